"""States that agents write to the storage when they end: whole or not there, once, and never over what is newer."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from azureml_elastic.checkpoint.format.catalogue import furthest, handed_over, survey, verify
from azureml_elastic.checkpoint.format.manifest import COMMITTED, HANDED_OVER, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.load.selection import adopt_handed_over
from azureml_elastic.checkpoint.snapshots.handed_over import write_handed_over
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointError, Fenced
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.node.agent.agent import keep_last_state
from azureml_elastic.train.agent_client.standalone import POINTER
from tests.support.shards import RefusingAgent
from tests.support.train import damages

PARENT = Reference("step-000000000003.round-000001.00000000", 3, "0" * 32)


class Notice:
    """A notice with this many seconds left."""

    def __init__(self, seconds):
        self.until = time.monotonic() + seconds

    @property
    def seconds_left(self):
        return self.until - time.monotonic()


def memory(storage, step, data=None):
    snapshot = Snapshot(
        step,
        {"model": [step]},
        {"epoch": 1} if data is None else data,
        storage=str(storage),
        parent=PARENT.to_json(),
        classes={"optimizer": "SGD"},
        tensors=local_chunks({"model/w": torch.full((2, 3), step)}),
    )
    return snapshot.to_memory()


def write(storage, step, rank=0, seconds=5.0, data=None):
    descriptor = memory(storage, step, data)
    try:
        return write_handed_over(descriptor, HandedOverState("", step, 4, rank), lambda: seconds)
    finally:
        os.close(descriptor)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "c")


def commit(storage, step, marker=COMMITTED):
    folder = str(FolderName(step, 1, "00000000"))
    manifest = Manifest(folder, step, 1, 1, None, {}, {}, None, "2")
    storage.make(folder)
    storage.write(folder, marker, [])
    storage.write(folder, MANIFEST, [manifest.to_bytes()])
    return manifest.reference


def test_a_state_is_a_checkpoint_of_one_rank(storage):
    where = write(storage, 7)
    (manifest,) = handed_over(storage, 6)
    assert where == f"{storage}/{manifest.directory}"
    assert (manifest.step, manifest.round, manifest.world_size, manifest.parent) == (7, 4, 1, PARENT)
    assert (manifest.state, manifest.data, manifest.classes) == ({"model": [7]}, {"epoch": 1}, {"optimizer": "SGD"})
    assert torch.__version__.startswith(manifest.torch)  # of a build as its metadata have it
    assert verify(storage, manifest) == []
    assert list(handed_over(storage, 7)) == []
    (found,) = survey(storage)
    assert not found.committed


@pytest.mark.parametrize("marker", [COMMITTED, HANDED_OVER])
def test_a_state_that_is_there_already_is_not_written_again(storage, marker):
    commit(storage, 8, marker)
    assert write(storage, 7).endswith(str(FolderName(8, 1, "00000000")))
    assert len(storage.folders()) == 1
    write(storage, 9)
    assert len(storage.folders()) == 2


def test_agents_that_end_at_once_write_one_copy(storage):
    places = {}
    threads = [
        threading.Thread(target=lambda rank=rank: places.update({rank: write(storage, 7, rank)})) for rank in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*places.values()}) == len(storage.folders()) == 1


def test_an_agent_that_was_killed_while_it_wrote_is_waited_for_half_of_the_time(storage):
    torn = str(FolderName(7, 4, "00000000"))
    storage.make(torn)
    storage.write(torn, HANDED_OVER, [])
    until = time.monotonic() + 0.6
    descriptor = memory(storage, 7)
    write_handed_over(descriptor, HandedOverState("", 7, 4, 0), lambda: until - time.monotonic())
    os.close(descriptor)
    (manifest,) = handed_over(storage, 0)
    assert manifest.directory != torn


def test_what_cannot_be_written_leaves_nothing_behind(storage):
    with pytest.raises(CheckpointError, match="does not name"):
        write("", 7)
    with pytest.raises(ValueError, match="JSON compliant"):
        write(storage, 7, data={"x": float("nan")})  # which no manifest may hold
    assert storage.folders() == []


def test_a_notice_that_comes_meanwhile_counts(storage, caplog):
    torn = str(FolderName(7, 4, "00000000"))
    storage.make(torn)
    storage.write(torn, HANDED_OVER, [])
    notice = Notice(float("inf"))
    descriptor = memory(storage, 7)
    last = threading.Thread(target=keep_last_state, args=(descriptor, HandedOverState("", 7, 4, 0), notice))
    last.start()
    notice.until = time.monotonic() + 2.0  # less than half of what it would wait for the other one
    last.join(20.0)
    assert not last.is_alive()
    assert [manifest.step for manifest in handed_over(storage, 0)] == [7]
    assert "is kept in" in caplog.text


def test_a_state_that_cannot_be_kept_is_said_and_the_agent_ends_as_it_would(caplog):
    read, _ = os.pipe()
    keep_last_state(read, HandedOverState("", 7, 4, 0), Notice(5.0))
    assert "The state of step 7 in memory could not be kept" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_the_furthest_whole_one_is_committed_by_the_next_start(storage):
    committed = commit(storage, 5)
    write(storage, 7)
    write(storage, 9)
    (torn,) = handed_over(storage, 8)
    path = storage.root / torn.directory / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    agent = RefusingAgent(storage)
    adopted = adopt_handed_over(storage, damages.Alone(), agent, committed)
    assert (adopted.step, agent.pointer()) == (7, adopted)
    assert COMMITTED in storage.files(adopted.directory)
    assert adopt_handed_over(storage, damages.Alone(), agent, adopted) is None


def test_one_that_is_not_beyond_the_committed_checkpoint_is_left_alone(storage):
    write(storage, 7)
    agent = RefusingAgent(storage)
    assert adopt_handed_over(storage, damages.Alone(), agent, commit(storage, 7)) is None
    assert adopt_handed_over(LocalStorage(storage.root / "none"), damages.Alone(), agent, None) is None
    assert not (storage.root / POINTER).exists()


@pytest.mark.parametrize(("refusal", "error"), [(Fenced("round 9"), Fenced), (ValueError("x"), CheckpointError)])
def test_a_refused_commit_ends_the_start(storage, refusal, error):
    write(storage, 7)
    with pytest.raises(error):
        adopt_handed_over(storage, damages.Alone(), RefusingAgent(storage, refusal), None)


def test_a_run_that_continues_another_one_takes_its_furthest_state(storage):
    committed = commit(storage, 5)
    assert furthest(storage, committed) == committed
    write(storage, 4)
    assert furthest(storage, committed) == committed
    write(storage, 7)
    assert furthest(storage, committed).step == 7
    assert furthest(storage, None).step == 7
