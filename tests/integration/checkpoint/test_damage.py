"""After a kill at any byte of a save and any damage to files, the newest undamaged checkpoint is restored."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from azureml_elastic.checkpoint.format.catalogue import entries
from azureml_elastic.checkpoint.format.manifest import FolderName
from azureml_elastic.checkpoint.load.reading import load
from azureml_elastic.checkpoint.load.selection import CheckpointSelector
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.errors import CheckpointDamaged
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from tests.support.train import damages
from tests.support.worlds import CONTEXT, TIMEOUT_S

CASES = int(os.environ.get("CHECKPOINT_CASES", "160"))
RUNS = 8


class Run:
    """A run that is killed, damaged and restored repeatedly."""

    def __init__(self, folder, seed):
        self.folder = folder
        self.folder.mkdir()
        self.moments = random.Random(seed)
        self.storage = LocalStorage(folder)
        self.agent = StandaloneAgent(self.storage, WorkerIdentity(1, 0, 2, 0))  # without a SIGTERM handler
        self.step, self.parent, self.round = 0, None, 0
        self.committed = set()
        self.written = {}

    def save(self):
        """Save until the process is killed."""
        self.round += 1
        process = CONTEXT.Process(
            target=damages.save_until_killed,
            args=(str(self.folder), self.round, self.step, self.parent, self.moments.getrandbits(32)),
            daemon=True,
        )
        process.start()
        process.join(TIMEOUT_S)
        assert process.exitcode == 9

    def whole(self):
        """Return step and folder of the undamaged committed checkpoints."""
        return {(FolderName.parse(name).step, name) for name in self.committed if self._is_as_written(name)}

    def note(self):
        """Record the committed checkpoints and the content of all files."""
        pointer = self.agent.pointer()
        if pointer is not None:
            self.committed.add(pointer.directory)
        for name in self.storage.folders():
            if "committed" in self.storage.files(name):
                self.committed.add(name)
        for name in self.storage.folders():
            for path in (self.folder / name).iterdir():
                self.written.setdefault((name, path.name), path.read_bytes())
        return pointer

    def restore(self):
        """Restore, and check that the result is the newest undamaged checkpoint with its full content."""
        pointer = self.note()
        if pointer is None:
            return
        expected = max(self.whole(), default=None)
        try:
            manifest = CheckpointSelector(self.storage, damages.Alone(), 0.0).newest_whole(pointer)
        except CheckpointDamaged:
            assert expected is None
            raise
        assert (manifest.step, manifest.directory) == expected
        tensors = load(self.storage, manifest, {}, damages.Alone())
        for name, tensor in damages.state_of(manifest.step).items():
            assert torch.equal(tensors[name], tensor)
        self.step, self.parent = manifest.step, manifest.reference.to_json()

    def damage(self):
        damages.damage(self.folder, self.moments)

    def _is_as_written(self, name):
        paths = [self.folder / name / file for file in ("manifest.json", "rank-00000.safetensors")]
        return all(path.exists() and path.read_bytes() == self.written[name, path.name] for path in paths)


@pytest.fixture
def memory():
    """A folder in memory, where flushing costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_newest_undamaged_checkpoint_is_restored(seed, memory):
    run, lives = Run(memory / "0", seed), 0
    for _ in range(CASES // RUNS):
        run.save()
        run.note()
        for _ in range(run.moments.choice([0, 0, 1, 1, 2, 4])):
            run.damage()
        try:
            run.restore()
        except CheckpointDamaged:
            lives += 1
            run = Run(memory / str(lives), run.moments.getrandbits(32))


def test_the_state_in_a_file_is_what_was_written(memory):
    run = Run(memory / "c", 1)
    while run.note() is None:
        run.save()
    run.restore()
    manifest = CheckpointSelector(run.storage, damages.Alone(), 0.0).newest_whole(run.agent.pointer())
    names = {entry.chunk.name for entry in entries(run.storage, manifest, "rank-00000.safetensors")}
    assert names == set(damages.state_of(1))
