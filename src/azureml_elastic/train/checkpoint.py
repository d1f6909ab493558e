"""Saving and restoring, so that a process killed at any line leaves the last committed checkpoint intact.

The order of a save is what makes it safe:

1. a fresh folder whose name no other attempt uses;
2. every rank writes its shards and reads them back for their checksums;
3. rank 0 writes the manifest, which names them all;
4. rank 0 asks the agent to commit: one compare-and-swap, refused when a newer round has taken over;
5. only then older checkpoints are removed.

Restoring goes the other way: pointer, manifest, every file's checksum, and only when *all* ranks agree are bytes read
into the model. Otherwise all ranks go back together to the manifest's parent.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from azureml_elastic.errors import CheckpointDamaged, CheckpointError, Fenced, TableUnavailable
from azureml_elastic.train import shards
from azureml_elastic.train.agent import Agent, Identity
from azureml_elastic.train.control import Control
from azureml_elastic.train.manifest import (
    MANIFEST,
    Manifest,
    Reference,
    checksum,
    directory_name,
    fsync_directory,
    round_of,
    write_new,
)
from azureml_elastic.train.recovery import COMMITTED, Recovery
from azureml_elastic.train.state import TrackedState

__all__ = ["Checkpoints", "Restored"]

_LOG = logging.getLogger(__name__)
_RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)
_PATIENT_SECONDS = (*_RETRY_SECONDS, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)
"""Without the committed checkpoint training cannot start; with a new one that has to wait, it goes on."""


@dataclass(frozen=True)
class Restored:
    """What was restored: the reference, and the data's position."""

    reference: Reference
    data: Mapping[str, Any] | None


class Checkpoints:
    """The checkpoints of a run. ``save`` and ``restore`` are collectives.

    Args:
        folder: that all ranks see; made when it is missing.
        keep: committed checkpoints to keep.
        identity: of this process.
        control: the ranks' agreement.
        agent: that keeps the pointer.
        sleep: between two attempts to reach an agent whose table is away.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        identity: Identity,
        control: Control,
        agent: Agent,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._agent = agent
        self._sleep = sleep
        self._committed: Reference | None = None
        self.enter(identity, control)

    def enter(self, identity: Identity, control: Control) -> None:
        """Save and restore with the ranks of another round from now on."""
        self._identity = identity
        self._control = control
        self._is_main = identity.rank == 0
        self._recovery = Recovery(self._folder, identity, control)

    def save(
        self, step: int, state: TrackedState, data: Mapping[str, Any] | None, *, must_commit: bool = False
    ) -> bool:
        """Take a checkpoint and commit it.

        Args:
            step: optimizer steps completed.
            state: to be saved.
            data: the position in the data.
            must_commit: whether no later checkpoint will make up for a table that is away now: worth some retries.

        Returns:
            Whether it was committed. Where the table is away it is not: training goes on, and the next checkpoint
            takes its place.

        Raises:
            CheckpointError: a rank could not write; raised on all, and the last committed checkpoint stays.
            Fenced: a newer round has taken over; raised on all.
        """
        began = time.monotonic()
        name = self._control.from_main(directory_name(step, self._identity.round, secrets.token_hex(4)))
        target = self._folder / name
        if self._is_main:
            _LOG.debug("Saving step %d to %s.", step, target)
        self._control.together(
            f"Making the folder {target}", lambda: target.mkdir(parents=True) if self._is_main else None
        )
        collected: dict[str, Any] = {}

        def collect() -> None:
            collected["plain"], collected["tensors"] = state.collect(is_main=self._is_main)

        self._control.together("Collecting the state", collect)
        shards.save(target, collected["tensors"], self._control.group)
        sums = self._control.together(
            f"Reading back the checkpoint {target}",
            lambda: {path.name: checksum(path) for path in shards.owned_files(target, self._identity.rank)},
        )
        files = {file: entry for part in sums for file, entry in part.items()}
        manifest = Manifest(
            directory=name,
            step=step,
            round=self._identity.round,
            world_size=self._identity.world_size,
            parent=self._committed,
            files=files,
            state=collected["plain"],
            data=data,
            torch=str(torch.__version__),
        )
        self._control.together(
            f"Writing the manifest of {target}", lambda: self._seal(manifest) if self._is_main else None
        )
        return self._commit(manifest, time.monotonic() - began, must_commit=must_commit)

    def _seal(self, manifest: Manifest) -> None:
        write_new(self._folder / manifest.directory / MANIFEST, manifest.to_bytes())
        fsync_directory(self._folder)

    def _commit(self, manifest: Manifest, seconds: float, *, must_commit: bool) -> bool:
        outcome = ("", "")
        if self._is_main:
            pauses = _RETRY_SECONDS if must_commit else ()
            outcome = self._patiently(lambda: self._agent.commit(manifest.reference, seconds), pauses)[1]
        kind, text = self._control.from_main(outcome)
        if kind == "fenced":
            raise Fenced(f"The checkpoint of step {manifest.step} was not committed: {text}")
        if kind == "error":
            raise CheckpointError(f"The checkpoint of step {manifest.step} could not be committed: {text}")
        if kind == "unavailable":
            if self._is_main:
                _LOG.warning(
                    "The checkpoint of step %d in %s could not be committed: %s Training goes on; the last "
                    "committed checkpoint is %s.",
                    manifest.step,
                    self._folder / manifest.directory,
                    text,
                    "none" if self._committed is None else self._committed.directory,
                )
            return False
        self._committed = manifest.reference
        if self._is_main:
            try:
                write_new(self._folder / manifest.directory / COMMITTED, b"")
                self._retain(manifest)
            except OSError as error:
                _LOG.warning("Old checkpoints in %s could not be removed: %s", self._folder, error)
        return True

    def _patiently(self, action: Callable[[], Any], pauses: tuple[float, ...]) -> tuple[Any, tuple[str, str]]:
        """Call the agent and return its answer, and how it failed as (kind, message)."""
        for pause in (*pauses, None):
            try:
                return action(), ("", "")
            except Fenced as error:
                return None, ("fenced", str(error))
            except TableUnavailable as error:
                if pause is None:
                    return None, ("unavailable", str(error))
                self._sleep(pause)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
                return None, ("error", f"{type(error).__name__}: {error}")
        raise AssertionError

    def _retain(self, newest: Manifest) -> None:
        """Remove all but the newest committed checkpoints, the manifest first."""
        kept = {newest.directory}
        parent = newest.parent
        while parent is not None and len(kept) < self._keep:
            kept.add(parent.directory)
            try:
                parent = Manifest.read(self._folder, parent.directory).parent
            except CheckpointDamaged:
                break
        for path in self._folder.iterdir():
            written_in = round_of(path.name)
            if written_in is not None and written_in <= self._identity.round and path.name not in kept:
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def committed(self) -> Reference | None:
        """Return the run's newest committed checkpoint. A collective.

        Raises:
            CheckpointError: it could not be learnt.
            Fenced: a newer round has taken over.
        """
        self._committed = self._pointer()
        return self._committed

    def restore(self, state: TrackedState) -> Restored | None:
        """Put the newest undamaged checkpoint, from the committed one backwards, into ``state``. A collective.

        Returns:
            What was restored, ``None`` where the run has no committed checkpoint yet.

        Raises:
            CheckpointDamaged: there is a pointer, but no checkpoint is whole.
            CheckpointError: the pointer could not be learnt, or a rank could not read.
            Fenced: a newer round has taken over.
            UsageError: the checkpoint does not fit what is tracked.
        """
        pointer = self._committed or self.committed()
        if pointer is None:
            return None
        manifest = self._recovery.newest_whole(pointer)
        state.require_names(manifest.state)
        _, present = state.collect(is_main=True)
        tensors = shards.load(self._folder / manifest.directory, present, self._control.group)
        state.restore(manifest.state, tensors)
        self._committed = manifest.reference
        return Restored(manifest.reference, manifest.data)

    def _pointer(self) -> Reference | None:
        asked: tuple[Reference | None, tuple[str, str]] = (None, ("", ""))
        if self._is_main:
            asked = self._patiently(self._agent.pointer, _PATIENT_SECONDS)
        pointer, (kind, text) = self._control.from_main(asked)
        if kind == "fenced":
            raise Fenced(f"Training does not start: {text}")
        if kind:
            raise CheckpointError(f"Whether there is a checkpoint to start from could not be learnt: {text}")
        return pointer
