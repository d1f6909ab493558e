"""The temporary folder of a node, and its removal after the node was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from azureml_elastic.node.host.temporary_folder import TemporaryFolder, remove_abandoned
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.table.sqlite import SqliteTable
from tests.support.channels import open_channel

LOCK = "azureml-elastic.lock"


KILLED = """
import os, signal, tempfile
from pathlib import Path
from azureml_elastic.node.host.temporary_folder import TemporaryFolder

folder = TemporaryFolder(Path(tempfile.gettempdir()))
(folder.path / "agent.sock").write_text("")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def age(path):
    os.utime(path, (time.time() - 100, time.time() - 100))


def test_the_folder_of_a_killed_node_is_removed_by_the_next_one(tmp_path):
    recorder = Recorder(tmp_path, "node-0", "inc", SqliteTable(tmp_path / "t.sqlite", "rows", "run"))
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    first = open_channel(recorder)
    assert killed.stdout.startswith(f"{first.folder.parent}/elastic-")
    assert not os.path.lexists(killed.stdout.strip())
    second = open_channel(recorder)
    assert (first.folder / LOCK).is_file()
    for channel in (first, second):
        channel.close()
        assert not channel.folder.exists()
    recorder.close()


def test_a_folder_stays_while_its_node_lives(tmp_path):
    living = TemporaryFolder(tmp_path)
    (living.path / "agent.sock").write_text("")
    age(living.path)
    assert remove_abandoned(tmp_path) == []
    assert sorted(path.name for path in living.path.iterdir()) == ["agent.sock", LOCK]
    assert living.path.stat().st_mode & 0o777 == 0o700
    living.close()
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_lock_is_removed_only_when_it_is_old_and_empty(tmp_path):
    for name in ("elastic-new", "elastic-old", "elastic-agent", "elastic-other", "other-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "elastic-file").write_text("")
    (tmp_path / "elastic-other" / "content").write_text("")
    for name in ("elastic-old", "elastic-other", "other-old"):
        age(tmp_path / name)
    assert remove_abandoned(tmp_path) == [tmp_path / "elastic-old"]


def test_a_link_to_a_folder_and_a_linked_lock_stay(tmp_path):
    target, linked = tmp_path / "target", tmp_path / "elastic-locked"
    for folder in (target, linked):
        folder.mkdir()
    (target / LOCK).write_text("")
    (tmp_path / "elastic-link").symlink_to(target)
    (linked / LOCK).symlink_to(target / LOCK)
    assert remove_abandoned(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_folder_of_another_user_stays(tmp_path):
    folder = tmp_path / "elastic-x"
    folder.mkdir()
    (folder / LOCK).write_text("")
    os.chown(folder, 65534, 65534)
    assert remove_abandoned(tmp_path) == []
    os.chown(folder, 0, 0)
    assert remove_abandoned(tmp_path) == [folder]
