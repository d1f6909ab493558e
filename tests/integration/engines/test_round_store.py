"""The store of a round, whose server may be frozen or gone."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from azureml_elastic.engines.engine import RoundStore
from azureml_elastic.environment import names as variables

SERVER = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.fixture
def server(monkeypatch):
    """A process with the server, in the environment."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", process.stdout.readline().strip())
        monkeypatch.setenv(variables.ENGINE_KEY, "00ff")
        yield process
        process.kill()


@pytest.fixture
def over():
    return threading.Event()


@pytest.fixture
def store(server, over):
    store = RoundStore.of_environment(over.is_set)
    yield store
    store.close()


def test_nodes_find_what_others_have_stored(store, over, monkeypatch):
    monkeypatch.setenv(variables.ENGINE_KEY, "")
    other = RoundStore.of_environment(over.is_set)
    assert other.get("address") is None
    store.set("address", b"tcp://a:1")
    assert other.get("address") == b"tcp://a:1"
    assert (store.add("nodes", 2), other.add("nodes", -1)) == (2, 1)
    assert (store.key, other.key) == (b"\x00\xff", b"")
    other.close()


def test_a_frozen_server_blocks_nobody_once_the_round_is_over(store, server, over):
    server.send_signal(signal.SIGSTOP)
    # The signal is delivered behind kill(): until all threads have stopped, the server answers.
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)
    threading.Timer(0.2, over.set).start()
    with pytest.raises(RuntimeError, match="The round is over"):
        store.add("nodes", 1)
    with pytest.raises(RuntimeError, match="The round is over"):
        RoundStore("127.0.0.1", 1, b"", over.is_set)


def test_a_closed_store_and_one_whose_server_is_gone_raise(store, server):
    server.kill()
    server.wait()
    with pytest.raises(RuntimeError):
        store.get("address")
    store.close()
    with pytest.raises(RuntimeError, match="The round is over"):
        store.get("address")
