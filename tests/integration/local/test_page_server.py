"""The dashboard's server: what it answers, and what it refuses."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.local.page_server import PageServer
from tests.support.chromium import Elements
from tests.support.paths import SAMPLES
from tests.support.waiting import until
from tests.support.whole_runs import gathering_cluster

PROGRAM = (sys.executable, "-c", "from azureml_elastic.cli import main; main()")
PAGE = b"<!doctype html><title>x</title>"


def request(server, method="GET", target="/", **headers):
    """Send a request and return its response with the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        connection.request(method, target, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@pytest.fixture
def server():
    with PageServer(lambda: PAGE) as started:
        yield started


@pytest.fixture
def guarded():
    """A server on all addresses, whose requests need its token."""
    with PageServer(lambda: PAGE, host="0.0.0.0") as started:
        yield started


def test_the_page_is_sent_and_not_again_if_it_is_the_same(server):
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
    response, body = request(server)
    assert (response.status, body) == (200, PAGE)
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in response.headers
    again, nothing = request(server, If_None_Match=response.headers["ETag"])
    assert (again.status, nothing) == (304, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"])
def test_all_methods_but_get_are_refused(server, method):
    response, _ = request(server, method)
    assert response.status == 405
    assert response.headers["Allow"] == "GET"


@pytest.mark.parametrize("target", ["/report.json", "/../etc/passwd", "/x/", "/%2e%2e/"])
def test_there_is_no_other_path(server, target):
    assert request(server, target=target)[0].status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "10.0.0.1"])
def test_another_host_than_the_loopback_is_refused(server, host):
    """A web site could let its own name resolve to this machine, and its scripts read what that name sends."""
    response, body = request(server, Host=host)
    assert response.status == 403
    assert PAGE not in body


@pytest.mark.parametrize("host", ["localhost:80", "LOCALHOST", "127.0.0.1", "[::1]:9"])
def test_the_loopback_s_names_are_accepted(server, host):
    assert request(server, Host=host)[0].status == 200


def test_elsewhere_each_request_needs_the_token(guarded):
    token = guarded.token
    assert guarded.url.endswith(f"/?token={token}")
    assert len(token) >= 32
    for target in ("/", "/?token=", f"/?token={token[:-1]}", f"/?token={token}x", "/?token=%ff%00", f"/{token}"):
        response, body = request(guarded, target=target)
        assert response.status == 403, target
        assert PAGE not in body
        assert token.encode() not in body
    assert request(guarded, target=f"/?token={token}", Host="any.example")[1] == PAGE
    assert request(guarded, target=f"/x?token={token}")[0].status == 404
    assert request(guarded, "POST", f"/?token={token}")[0].status == 405


def test_each_server_has_a_token_of_its_own(guarded):
    with PageServer(lambda: PAGE, host="0.0.0.0") as other:
        assert other.token != guarded.token


def test_a_port_in_use_is_named(server):
    port = server.server_address[1]
    with pytest.raises(UsageError, match=f"port {port}"):
        PageServer(lambda: PAGE, port=port)


def test_malformed_requests_do_not_end_the_server(server):
    for data in (b"GET\r\n\r\n", b"\x00\xff\r\n\r\n", b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HT"):
        with socket.create_connection(server.server_address, timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert request(server)[0].status == 200


def test_the_dashboard_follows_a_local_run_until_its_end(tmp_path):
    """The command is in a process of its own, while this one trains with a fault."""
    folder = tmp_path / "run"
    folder.mkdir()
    cluster = gathering_cluster(folder, "kill=rank0@step:20", timeout=120, run_dir=folder)

    def page(url):
        with urllib.request.urlopen(url, timeout=30) as response:
            return Elements.of(response.read().decode())

    def watch(url):
        until(lambda: page(url).all("figure", id="nodes-figure"), timeout=90, interval=0.2)
        running = page(url)
        until(lambda: "data-poll" not in page(url).all("html")[0], timeout=120, interval=0.2)
        return running, page(url)

    with (
        subprocess.Popen((*PROGRAM, "report", "--serve", str(folder)), stdout=subprocess.PIPE, text=True) as shown,
        ThreadPoolExecutor(1) as beside,
    ):
        try:
            url = re.search(r"http://\S+", shown.stdout.readline())[0]
            assert "data-poll" in page(url).all("html")[0]
            watching = beside.submit(watch, url)
            report = cluster.run([str(SAMPLES / "digits.py"), "--epochs", "3", "--step-delay", "0.05"])
            running, ended = watching.result()
        finally:
            shown.send_signal(signal.SIGINT)
            assert shown.wait(timeout=300) == 130
    assert "The run is running" in running.source
    assert "data-poll" in running.all("html")[0]
    assert report.outcome == "succeeded", report.message
    assert "kill=rank0@step:20" in ended.source
    assert "✓ Yes" in ended.source
    assert load_report(folder).outcome == "succeeded"
