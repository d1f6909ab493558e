"""The emulator as a child process, and its installation."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import psutil
import pytest
from azure.storage.blob import ContainerClient

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import TableUnavailable, UsageError
from azureml_elastic.local.azurite import Azurite, install_azurite
from azureml_elastic.node.table import open_table

PARENT = """
import sys, time
from azureml_elastic.local.azurite import Azurite
emulator = Azurite().__enter__()
print(emulator.pid, emulator.endpoint, flush=True)
time.sleep(300)
"""


def test_the_emulator_serves_as_long_as_its_context():
    with Azurite() as emulator:
        process = psutil.Process(emulator.pid)
        assert os.getpgid(process.pid) == process.pid
        table = open_table(TableRendezvous(endpoint=emulator.endpoint), "run", NodeEnvironment.read({}))
        table.insert("key", {})
        table.close()
        assert emulator.endpoint in emulator.connection_string
        port = int(emulator.endpoint.split("/")[2].rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):  # it listens on one loopback address, not on all
            socket.create_connection(("127.0.0.2", port), timeout=5)
    assert emulator.pid is None
    assert not process.is_running()


def test_two_emulators_are_independent(azurite):
    with Azurite() as other:
        assert other.endpoint != azurite.endpoint
        open_table(TableRendezvous(endpoint=other.endpoint, table="apart"), "run", NodeEnvironment.read({})).close()


def test_the_emulator_ends_with_a_killed_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        pid, endpoint = parent.stdout.readline().split()
        emulator = psutil.Process(int(pid))
        os.kill(parent.pid, signal.SIGKILL)
        psutil.wait_procs([emulator], timeout=20)
        assert not emulator.is_running() or emulator.status() == psutil.STATUS_ZOMBIE
    connection = HTTPConnection(endpoint.split("/")[2], timeout=5)
    with pytest.raises(OSError, match="refused"):
        connection.connect()


def test_a_service_that_does_not_start_is_reported_with_its_output():
    code = "import sys; sys.exit('cannot listen on port ' + sys.argv[-1])"
    with (
        pytest.raises(TableUnavailable, match=r"exited with code 1 before it listened.*cannot listen on port 0"),
        Azurite([sys.executable, "-c", code]),
    ):
        pass


def test_a_service_that_never_listens_is_ended(monkeypatch):
    monkeypatch.setattr("azureml_elastic.local.azurite._START_TIMEOUT_S", 0.5)
    emulator = Azurite([sys.executable, "-c", "import time; print('starting', flush=True); time.sleep(300)"])
    with pytest.raises(TableUnavailable, match=r"does not listen after 0\.5 s"), emulator:
        pass
    assert emulator.pid is None


def test_the_port_is_the_one_that_the_service_reports():
    code = """
import http.server, sys
assert sys.argv[sys.argv.index("--tablePort") + 1] == "0"
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
print("starting on port 0\\nlistening on port", server.server_port, flush=True)
server.serve_forever()
"""
    with Azurite([sys.executable, "-c", code]) as emulator:
        port = int(emulator.endpoint.split("/")[2].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_the_blob_service():
    with (
        Azurite(service="blob") as emulator,
        ContainerClient.from_connection_string(emulator.connection_string, "mine") as container,
    ):
        assert not container.exists()


def package(path, script):
    """Write an npm package named azurite whose table service is this script."""
    files = {"package.json": json.dumps({"name": "azurite", "version": "9.9.9"})} | (
        {"dist/src/table/main.js": script} if script else {}
    )
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return str(path)


def test_concurrent_installations_install_once(tmp_path):
    archive = package(tmp_path / "azurite.tgz", "console.log('it is ' + 9)")
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        (script,) = set(pool.map(lambda _: install_azurite(cache, archive), range(3)))
    assert script.read_text() == "console.log('it is ' + 9)"
    assert sorted(path.name for path in cache.iterdir() if not path.is_dir()) == ["azurite.lock"]
    assert len(list(cache.iterdir())) == 2
    (tmp_path / "azurite.tgz").unlink()
    assert install_azurite(cache, archive) == script


def test_a_failed_installation_reports_the_output_of_npm(tmp_path):
    with pytest.raises(UsageError, match=r"npm could not install .*missing\.tgz \(exit code \d+\): .*'sqlite'"):
        install_azurite(tmp_path / "cache", str(tmp_path / "missing.tgz"))
    empty = package(tmp_path / "empty.tgz", None)
    with pytest.raises(UsageError, match="npm could not install"):
        install_azurite(tmp_path / "cache", empty)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["azurite.lock"]
