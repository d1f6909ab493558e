"""A process that saves until it is killed at any byte, and damage to its files afterwards."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from azureml_elastic.checkpoint.format.manifest import COMMITTED, DAMAGED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.format.shard_file import Layout, assign
from azureml_elastic.checkpoint.save.background_save import SaveTask
from azureml_elastic.checkpoint.save.local_shard import ShardCopy, StagingBuffer
from azureml_elastic.checkpoint.state.layout import held
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent

IDENTITY = WorkerIdentity(0, 0, 1, 0)


class Alone:
    """The control group of a single rank."""

    rank, world_size = 0, 1

    def gather(self, value):
        return [value]

    def from_main(self, value):
        return value

    def from_rank(self, source, value):
        return value

    def together(self, what, action):
        try:
            return [action()]
        except Exception as error:
            raise CheckpointError(f"{what} failed: {error}") from error


def state_of(step):
    """Return tensors that depend on the step in every byte."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(7, 5, generator=generator),
        "model/b": torch.full((9,), step, dtype=torch.int64),
        "optimizer/step": torch.tensor(float(step)),
    }


class Mortal(LocalStorage):
    """A storage whose process dies after a number of ticks: one for each call, and for each few bytes written."""

    def __init__(self, root, ticks, moments):
        super().__init__(root)
        self.ticks = ticks
        self.moments = moments

    def tick(self):
        self.ticks -= 1
        if self.ticks <= 0:
            os._exit(9)

    def make(self, folder):
        self.tick()
        super().make(folder)
        self.tick()

    def write(self, folder, name, blocks):
        self.tick()
        sums = super().write(folder, name, self._pieces(blocks))
        self.tick()
        return sums

    def remove(self, folder, first):
        self.tick()
        if self.moments.random() < 0.3:
            # The process dies after the first of several removals.
            (self.root / folder / first).unlink(missing_ok=True)
            self.tick()
        super().remove(folder, first)
        self.tick()

    def _pieces(self, blocks):
        for block in blocks:
            view, begin = memoryview(block).cast("B"), 0
            while begin < len(view):
                size = self.moments.randint(1, 400)
                yield view[begin : begin + size]
                begin += size
                self.tick()
        self.tick()


class MortalAgent(StandaloneAgent):
    """An agent whose process may die before or after the commit."""

    def __init__(self, folder, storage):
        super().__init__(LocalStorage(folder), IDENTITY)
        self.mortal = storage

    def commit(self, reference, stall_seconds):
        self.mortal.tick()
        super().commit(reference, stall_seconds)
        self.mortal.tick()


def save_until_killed(folder, number, step, parent, seed):
    """Save one step after another until the process dies.

    Args:
        folder: folder of the checkpoints.
        number: number of the round.
        step: restored step.
        parent: reference of the restored checkpoint as JSON.
        seed: random seed of the moment of death.
    """
    moments = random.Random(seed)
    storage = Mortal(Path(folder), moments.randint(1, 120), moments)
    agent = MortalAgent(Path(folder), storage)
    reference = None if parent is None else Reference.from_json(parent)
    buffer = StagingBuffer(torch.device("cpu"))
    buffer.reserve(1 << 16)
    while True:
        step += 1
        tensors = state_of(step)
        layout = Layout.of(assign([held(tensors)])[0])
        chunks = [bytes(tensors[e.chunk.name].reshape(-1).view(torch.uint8).tolist()) for e in layout.entries]
        content = b"".join([layout.header, *chunks])
        manifest = Manifest(
            directory=str(FolderName(step, number, f"{moments.getrandbits(32):08x}")),
            step=step,
            round=number,
            world_size=1,
            parent=reference,
            files={},
            state={"model": None, "optimizer": None},
            data=None,
            torch="2",
        )
        buffer.put(0, content)
        copy = ShardCopy(buffer, len(content), 0, empty=False)
        saving = SaveTask(
            *(manifest, copy, None, Alone(), agent),
            storage=storage,
            keep=3,
            stall_seconds=0.0,
            pauses=(),
        )
        saving.start()
        saving.wait()
        reference = saving.manifest.reference


def damage(folder, moments):
    """Damage a file of a checkpoint, other than its commit marker; return the name of the folder."""
    files = sorted(path for path in folder.glob("step-*/*") if path.name not in (COMMITTED, DAMAGED))
    if not files:
        return None
    path = moments.choice(files)
    content = path.read_bytes()
    kind = moments.choice(["bit", "cut", "gone", "longer", "zeros", "other"])
    if kind == "gone" or not content:
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: moments.randrange(len(content))])
    elif kind == "longer":
        path.write_bytes(content + moments.randbytes(moments.randint(1, 9)))
    elif kind == "zeros":
        begin = moments.randrange(len(content))
        size = moments.randint(1, len(content) - begin)
        path.write_bytes(content[:begin] + bytes(size) + content[begin + size :])
    elif kind == "other":
        others = [other for other in files if other.name == path.name and other != path]
        path.write_bytes(moments.choice(others).read_bytes() if others else b"")
    else:
        changed = bytearray(content)
        changed[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
        path.write_bytes(changed)
    if path.exists() and path.read_bytes() == content:
        return None
    return path.parent.name


__all__ = ["MANIFEST", "Alone", "damage", "save_until_killed", "state_of"]
