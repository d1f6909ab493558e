"""A state in the memory of an agent that must end, written to storage as a checkpoint that the next start commits.

A state in memory outlives its worker but not its agent. Whatever ends an agent may end those of all nodes at once, so
the agent writes the state first: the memory is the one file of a checkpoint of a world of one rank. It needs no table:
the folder is marked as handed over, and what starts next commits it if its step is beyond the committed one
(:func:`~azureml_elastic.checkpoint.load.selection.adopt_handed_over`). Each agent writes a folder of its own, the
manifest last, so that neither a torn one nor one of several is mistaken for another.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from azureml_elastic.checkpoint.format.manifest import COMMITTED, HANDED_OVER, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.format.shard_file import read_header
from azureml_elastic.checkpoint.storage.local import fill
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.checkpoint.storage.storage import BLOCK_BYTES, Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointError
from azureml_elastic.ipc.agent_interface import HandedOverState

_FILE = "rank-00000.safetensors"

_TURN_SECONDS = 0.05
"""Time that each rank leaves the one before it to begin: one copy is enough where all agents end at once."""

_MAX_TURN_SECONDS = 1.0
"""Longest time that a rank waits for all those before it."""

_POLL_SECONDS = 0.2


def write_handed_over(descriptor: int, state: HandedOverState, seconds_left: Callable[[], float]) -> str:
    """Write a state to the run's storage, unless one of this step or a later one is there; return where it is.

    The descriptor is that of the memory. Half of the seconds that are left may be spent on waiting for an agent that
    already writes such a state.

    Raises:
        CheckpointError: the memory holds no state for a checkpoint.
        OSError: it could not be written.
    """
    _, note = read_header(lambda begin, memory: fill(descriptor, begin, memory, "memory"), "the memory")
    header = json.loads(note or "{}")
    if not header.get("storage"):
        raise CheckpointError(f"the state of step {state.step} does not name the run's storage")
    storage = open_storage(header["storage"])
    time.sleep(min(_TURN_SECONDS * state.rank, _MAX_TURN_SECONDS, seconds_left()))
    if (other := _written_by_another(storage, state.step, seconds_left)) is not None:
        return f"{storage}/{other}"
    folder = str(FolderName(state.step, state.round, secrets.token_hex(4)))
    torch = "unknown"
    with contextlib.suppress(PackageNotFoundError):  # of a build without metadata; the import is the workers'
        torch = version("torch")
    try:
        storage.make(folder)
        storage.write(folder, HANDED_OVER, [])  # first, so that the agents of other nodes see it, and wait
        sums = storage.write(folder, _FILE, _blocks(descriptor))
        manifest = Manifest(
            directory=folder,
            step=state.step,
            round=state.round,
            world_size=1,
            parent=None if header["parent"] is None else Reference.from_json(header["parent"]),
            files={_FILE: sums},
            state=header["state"],
            data=header["data"],
            torch=torch,
            classes=header["classes"],
        )
        storage.publish(folder, MANIFEST, manifest.to_bytes())
    except BaseException:
        with contextlib.suppress(OSError):
            storage.remove(folder, MANIFEST)
        raise
    return f"{storage}/{folder}"


def _written_by_another(storage: Storage, step: int, seconds_left: Callable[[], float]) -> str | None:
    """Return the folder of a checkpoint of this step or a later one, waiting for one that an agent writes now."""
    enough = seconds_left() / 2
    while True:
        # An agent that was killed while it wrote leaves its marker for ever: hence the limit.
        begun = False
        for folder in reversed(storage.folders()):
            name = FolderName.parse(folder)
            if name is None or name.step < step:
                continue
            files = storage.files(folder)
            if {COMMITTED, HANDED_OVER} & files.keys():
                if MANIFEST in files:
                    return folder
                begun = True
        if not begun or seconds_left() < enough:
            return None
        time.sleep(_POLL_SECONDS)


def _blocks(descriptor: int) -> Iterator[bytes]:
    begin = 0
    while block := os.pread(descriptor, BLOCK_BYTES, begin):
        yield block
        begin += len(block)
