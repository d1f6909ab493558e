"""Locks of torch's compiled extensions, held by real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.host import extension_locks
from azureml_elastic.node.host.extension_locks import remove_stale_locks

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir()
    return path


def test_a_lock_is_removed_once_the_process_that_holds_it_is_killed(tmp_path, lock):
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        assert remove_stale_locks(NodeEnvironment.read(environ)) == []
        assert lock.exists()
        process.send_signal(signal.SIGKILL)
    assert remove_stale_locks(NodeEnvironment.read(environ)) == [lock]
    assert not lock.exists()
    assert remove_stale_locks(NodeEnvironment.read(environ)) == []


def test_the_default_folder(tmp_path):
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "some_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert remove_stale_locks(NodeEnvironment.read({"XDG_CACHE_HOME": str(tmp_path)})) == [lock]


def test_a_file_system_of_several_machines_is_left_alone(tmp_path, lock, monkeypatch):
    lock.touch()
    kinds = [type("Mount", (), {"mountpoint": "/", "fstype": "ext4"})]
    kinds.append(type("Mount", (), {"mountpoint": str(tmp_path), "fstype": "nfs4"}))
    monkeypatch.setattr(extension_locks.psutil, "disk_partitions", lambda **_: kinds)
    assert remove_stale_locks(NodeEnvironment.read({"TORCH_EXTENSIONS_DIR": str(tmp_path)})) == []
    assert lock.exists()
