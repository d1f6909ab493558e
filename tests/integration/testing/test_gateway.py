"""The gateway: requests to the workspace and tunnels to other hosts."""

import contextlib
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from azureml_elastic.testing.api.gateway import Gateway
from azureml_elastic.testing.messages import Answer, document

HOST = "workspace.example"


def echo(request):
    return document({"host": request.host, "target": request.target, "body": request.body.decode()})


def broken(request):
    raise RuntimeError("out of order")


@pytest.fixture
def gateway(tmp_path):
    (tmp_path / "none.pem").write_text("")
    with Gateway({HOST: echo, "broken.example": broken}, lambda _: Answer(200, body=b"self")) as gateway:
        bundle = gateway.write_bundle(tmp_path / "bundle.pem", tmp_path / "none.pem")
        gateway.trust = ssl.create_default_context(cafile=bundle)
        yield gateway


def call(gateway, url, body=None):
    handlers = (
        urllib.request.ProxyHandler({"https": gateway.address}),
        urllib.request.HTTPSHandler(context=gateway.trust),
    )
    with urllib.request.build_opener(*handlers).open(urllib.request.Request(url, data=body), timeout=10) as answer:
        return answer.read()


def test_a_known_host_is_answered_under_a_certificate_of_its_own(gateway):
    output = call(gateway, f"https://{HOST}/a%20b?c=1", b"text")
    assert output == b'{"host": "workspace.example", "target": "/a%20b?c=1", "body": "text"}'


def test_a_client_that_does_not_trust_the_authority_is_not_served(gateway):
    gateway.trust = ssl.create_default_context(cafile=None)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        call(gateway, f"https://{HOST}/")


def test_an_error_within_is_an_answer(gateway):
    with pytest.raises(urllib.error.HTTPError) as found:
        call(gateway, "https://broken.example/")
    with found.value as error:
        assert error.code == 500
        assert b"out of order" in error.read()


def test_a_plain_request_is_to_the_node_itself(gateway):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{gateway.address}/token", timeout=10) as answer:
        assert answer.read() == b"self"


@contextlib.contextmanager
def tunnel(gateway, port):
    host, _, own = gateway.address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(own)), timeout=10) as client:
        client.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        yield client


def test_another_host_is_reached_byte_by_byte(gateway):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reverse():
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(100)[::-1])

        thread = threading.Thread(target=reverse)
        thread.start()
        with tunnel(gateway, server.getsockname()[1]) as client:
            answer = client.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            client.sendall(b"abc")
            assert client.makefile("rb").read() == b"cba"
        thread.join()


def test_an_unreachable_host_is_reported(gateway):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tunnel(gateway, port) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 502")


def test_it_closes_while_connections_are_open():
    with Gateway({HOST: echo}, lambda _: Answer(200)) as gateway:
        host, _, port = gateway.address.removeprefix("http://").partition(":")
        client = socket.create_connection((host, int(port)), timeout=10)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert client.recv(1000)
    with client:
        assert client.recv(1000) == b""
