"""Saves in the background: what they wait for, and their outcome after failures."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.format.manifest import COMMITTED, Manifest
from azureml_elastic.checkpoint.load.selection import EarlierCheckpoint
from azureml_elastic.checkpoint.save.local_shard import StagingBuffer
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.errors import CheckpointError, Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from tests.support.train import workers


class Agent(StandaloneAgent):
    """An agent whose commits wait for a signal and may fail."""

    def __init__(self, folder):
        super().__init__(LocalStorage(folder), WorkerIdentity(1, 0, 2, 0))
        self.asked = threading.Event()
        self.may = threading.Event()
        self.may.set()
        self.error = None

    def commit(self, reference, stall_seconds):
        self.asked.set()
        assert self.may.wait(300)
        if self.error is not None:
            raise self.error
        super().commit(reference, stall_seconds)


class SlowlyRemoving(LocalStorage):
    """A folder whose removals wait for a signal."""

    def __init__(self, folder):
        super().__init__(folder)
        self.may = threading.Event()
        self.may.set()

    def remove(self, folder, first):
        assert self.may.wait(300)
        super().remove(folder, first)


class One:
    """A single rank with its model and its checkpoints."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder
        self.world = ProcessGroups(WorkerIdentity(0, 0, 1, 0), torch.device("cpu"))
        self.world.open()
        self.agent = Agent(folder)
        self.storage = SlowlyRemoving(folder)
        self.checkpoints = Checkpoints(workers.policy(folder), self.storage, self.world, self.agent, stale_seconds=0.0)
        self.model = nn.Linear(3, 2)
        self.state = TrackedState({"model": self.model})

    def fill(self, value):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def save(self, step):
        self.checkpoints.begin(step, self.state, None)

    def saved(self, step):
        """Save, and return the kind of the outcome."""
        self.save(step)
        return self.checkpoints.settle().kind

    def restored(self):
        """Return the step and the weights that are restored."""
        self.fill(-1.0)
        found = self.checkpoints.restore(self.state)
        return found.step, self.model.bias.tolist()


@pytest.fixture
def one(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    made = One(tmp_path / "c")
    yield made
    made.agent.may.set()
    made.checkpoints.settle()
    made.checkpoints.finish()
    dist.destroy_process_group()


def test_training_goes_on_while_a_checkpoint_is_written(one):
    one.agent.may.clear()
    one.fill(1.0)
    one.save(1)
    assert one.agent.asked.wait(300)
    one.fill(2.0)  # the next step
    assert one.checkpoints.settle(0.01) is None
    one.agent.may.set()
    assert one.checkpoints.settle().kind == "committed"
    assert one.restored() == (1, [1.0, 1.0])


def test_a_commit_does_not_wait_for_the_removal_of_older_checkpoints(one):
    def steps():
        return [int(name[5:17]) for name in one.storage.folders()]

    for step in (1, 2, 3):
        if step == 3:
            one.storage.may.clear()
        assert one.saved(step) == "committed"
    assert steps() == [1, 2, 3]
    one.storage.may.set()
    one.checkpoints.finish()
    assert steps() == [2, 3]


def test_a_prepared_plan_is_used(one):
    one.checkpoints.prepare(one.state)
    one.fill(3.0)
    one.saved(1)
    one.fill(4.0)
    one.saved(2)
    assert one.restored() == (2, [4.0, 4.0])


def test_a_state_of_another_form_is_planned_anew(one):
    one.saved(1)
    one.model.register_buffer("more", torch.arange(5))
    one.saved(2)
    one.model.more.zero_()
    one.checkpoints.restore(one.state)
    assert one.model.more.tolist() == [0, 1, 2, 3, 4]


def test_one_failure_is_tolerated_and_two_raise(one):
    one.saved(1)
    hidden = one.folder.with_name("hidden")
    for step in (2, 3):
        one.checkpoints.require()
        one.folder.rename(hidden)
        one.folder.write_text("no folder")
        assert one.saved(step) == "failed"
        with pytest.raises(CheckpointError, match=f"step {step}: writing failed on 1 rank: rank 0: "):
            one.checkpoints.require(at_once=True)
        one.folder.unlink()
        hidden.rename(one.folder)
    with pytest.raises(CheckpointError, match=r"step 2: .*; step 3: "):
        one.checkpoints.require()
    assert one.saved(4) == "committed"
    one.checkpoints.require(at_once=True)


def test_a_full_disk_leaves_nothing_behind(one, monkeypatch):
    one.saved(1)
    before = one.checkpoints.committed()

    def full(descriptor, block):
        del descriptor, block
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)  # simulates a full disk
        assert one.saved(2) == "failed"
    assert LocalStorage(one.folder).folders() == [before.directory]
    assert one.checkpoints.committed() == before


def test_a_folder_that_is_removed_during_the_commit_is_no_checkpoint(one):
    one.agent.may.clear()
    one.save(1)
    assert one.agent.asked.wait(300)
    shutil.rmtree(one.folder)
    one.agent.may.set()
    outcome = one.checkpoints.settle()
    assert outcome.kind == "failed"
    assert outcome.text.endswith("was removed while it was committed")
    one.fill(2.0)
    assert one.saved(2) == "committed"
    assert one.restored() == (2, [2.0, 2.0])


@pytest.mark.parametrize(
    ("error", "kind"), [(TableUnavailable("away"), "unavailable"), (Fenced("round 9 has taken over"), "fenced")]
)
def test_a_refused_commit_leaves_the_previous_checkpoint(one, error, kind):
    one.saved(1)
    one.agent.error = error
    assert one.saved(2) == kind
    assert one.checkpoints.committed().step == 1
    if kind == "fenced":
        with pytest.raises(Fenced, match="step 2 was not committed: round 9"):
            one.checkpoints.require()
    else:
        one.checkpoints.require(at_once=True)


def test_the_save_of_an_ended_round_commits_nothing_and_the_next_save_waits_for_it(one):
    one.saved(1)
    one.agent.may.clear()
    one.save(2)
    assert one.agent.asked.wait(300)
    one.checkpoints.abandon()
    one.checkpoints.enter()
    assert not one.checkpoints.under_way
    one.agent.may.set()
    one.fill(3.0)
    assert one.saved(3) == "committed"
    assert one.restored() == (3, [3.0, 3.0])


def test_a_refusal_of_the_former_round_does_not_count_in_the_next_one(one):
    one.agent.error = Fenced("round 9 has taken over")
    one.saved(1)
    one.agent.error = None
    one.checkpoints.enter()
    one.checkpoints.require(at_once=True)
    assert one.saved(2) == "committed"


def test_a_run_starts_from_the_earlier_run_until_it_has_a_whole_checkpoint_of_its_own(one, tmp_path):
    one.fill(3.0)
    assert one.saved(3) == "committed"
    earlier = EarlierCheckpoint(LocalStorage(one.folder), one.checkpoints.committed())
    (one.folder / earlier.reference.directory / COMMITTED).unlink()  # as if its writer had died before
    before = sorted(one.folder.rglob("*"))

    own = tmp_path / "own"

    def another():
        agent = Agent(own)
        return Checkpoints(workers.policy(own), LocalStorage(own), one.world, agent, stale_seconds=0.0, earlier=earlier)

    own.mkdir()
    one.checkpoints = another()
    assert one.restored() == (3, [3.0, 3.0])
    assert one.checkpoints.newest != Manifest.read(earlier.storage, earlier.reference.directory).reference
    one.fill(5.0)
    assert one.saved(5) == "committed"
    manifest = Manifest.read(LocalStorage(own), one.checkpoints.committed().directory)
    assert manifest.parent is None
    assert sorted(one.folder.rglob("*")) == before

    one.checkpoints = another()
    assert one.restored() == (5, [5.0, 5.0])
    (own / manifest.directory / next(iter(manifest.files))).write_bytes(b"")
    one.checkpoints = another()
    assert one.restored() == (3, [3.0, 3.0])
    assert one.saved(4) == "committed"
    assert Manifest.read(LocalStorage(own), one.checkpoints.committed().directory).parent is None


def test_each_checkpoint_refers_to_its_parent(one):
    for step in (1, 2):
        one.saved(step)
    newest = one.checkpoints.committed()
    manifest = Manifest.read(LocalStorage(one.folder), newest.directory)
    assert manifest.parent.step == 1
    assert Manifest.read(LocalStorage(one.folder), manifest.parent.directory).parent is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex128, torch.int8])
def test_staging_copies_tensors_of_any_type_and_stride(dtype):
    buffer = StagingBuffer(torch.device("cpu"))
    buffer.reserve(1000)
    size = buffer.nbytes
    tensor = torch.arange(24).reshape(4, 6).to(dtype).t()[1:]
    buffer.take(64, tensor)
    buffer.synchronize()
    content = bytes(buffer.view(64, 64 + tensor.numel() * tensor.element_size()))
    assert torch.equal(torch.frombuffer(bytearray(content), dtype=dtype).reshape(tensor.shape), tensor)
    buffer.reserve(10)
    assert buffer.nbytes == size
    buffer.reserve(10 * size)
    assert buffer.nbytes >= 10 * size
    buffer.release()
