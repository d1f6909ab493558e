"""The process of a round's store: what it serves, and what its agent gets to know when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from datetime import timedelta

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from azureml_elastic.forks.store_server import libuv_listens, listening_store
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.failures.classification import store_failure
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.store_process import StoreProcess
from tests.support.forks.starting import preload_server
from tests.support.paths import SUPPORT
from tests.support.waiting import until

SECONDS = timedelta(seconds=60)


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(preload_server(SUPPORT / "forks" / "probe.py")) as process:
        assert process.wait_ready(120), process.refusal
        yield process


@contextlib.contextmanager
def store_process(server, kind=socket.SOCK_STREAM):
    """Serve a store on a socket of a kind; gives its handle, its address and the event of its end."""
    listener = socket.socket(socket.AF_INET, kind)
    listener.bind(("127.0.0.1", 0))
    if kind == socket.SOCK_STREAM:
        listener.listen()
    member = Member("node", "x", host="127.0.0.1", store_port=listener.getsockname()[1])
    ended = EventQueue()
    process = StoreProcess(Assignment(Round(state="sealed", members=(member,)), 0, listener), server, ended)
    try:
        yield process, (member.host, member.store_port), ended
    finally:
        process.close()


def connect(host, port):
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=SECONDS)


def started(forked, server):
    return server if forked else None


@pytest.mark.parametrize(
    ("version", "listens"),
    [
        ("2.6.0", False),
        ("2.7.1+cu126", False),
        ("2.8.0a0+5228986c39.nv25.6", False),
        ("2.8.0", True),
        ("2.8.0+cpu", True),
        ("2.13.0+cpu", True),
    ],
)
def test_the_backend_of_each_release_is_one_that_takes_a_listening_socket(version, listens):
    assert libuv_listens(version) is listens


def test_a_store_is_served_on_a_socket_that_listens_already():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = listening_store("127.0.0.1", port, listener.detach(), SECONDS)
    client = connect("127.0.0.1", port)
    assert store.num_keys() == 0
    client.set("key", "value")
    assert (store.get("key"), client.add("number", 3), store.num_keys()) == (b"value", 3, 2)


@pytest.mark.skipif(not libuv_listens(torch.__version__), reason="it is the only one of this release")
def test_the_older_backend_counts_keys_as_the_newer_one_does():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False
    )
    assert store.num_keys() == 0
    connect("127.0.0.1", port).add("key", 1)  # which is answered, as set() is not: another client may be served before
    assert store.num_keys() == 1


@pytest.mark.parametrize("forked", [False, True])
def test_the_agent_sees_that_workers_have_set_keys(server, forked):
    with store_process(started(forked, server)) as (process, address, ended):
        connect(*address).set("key", "value")
        until(process.has_keys)
    assert process.end is None
    assert not ended.wait(0.0)


@pytest.mark.parametrize("forked", [False, True])
def test_the_error_of_a_store_reaches_its_agent(server, forked):
    """A socket of another kind is one that torch can serve nothing on."""
    with store_process(started(forked, server), socket.SOCK_DGRAM) as (process, _, ended):
        process.has_keys()  # asked, but it never answers
        assert ended.wait(60)
        assert process.end is not None
        failure = store_failure(0, process.end.exit_code, process.end.error)
    assert (failure.kind, failure.exit_code, failure.conclusive) == ("store", 1, True)
    assert "Failed to" in failure.message.splitlines()[-1]  # torch's reason
    assert "listening_store" in failure.message


@pytest.mark.parametrize("forked", [False, True])
def test_of_a_killed_store_the_signal_is_known(server, forked):
    with store_process(started(forked, server)) as (process, address, ended):
        connect(*address).set("key", "value")
        os.kill(serving(address), signal.SIGKILL)
        assert ended.wait(60)
        assert process.end is not None
        failure = store_failure(0, process.end.exit_code, process.end.error)
    assert (failure.exit_code, failure.conclusive) == (128 + signal.SIGKILL, False)
    assert failure.message == "The process of the round's store ended with SIGKILL."


def serving(address):
    """Return the process that listens on an address."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            if address in listening:
                return process.pid
    raise AssertionError(address)
