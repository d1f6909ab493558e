"""Replacement of the agent where a script runs by itself: ``python train.py`` or plain ``torchrun``.

The pointer to the committed checkpoint is the file ``latest.json`` in the checkpoint folder, replaced atomically; that
is safe on a local disk with one run at a time, which is what the real agent's table removes as a condition. A second
run in the folder is detected by its commits. Where the file is missing or unreadable, the newest complete checkpoint of
the folder is restored.

A single process treats SIGTERM as a preemption notice: it saves after the current step and exits with
:data:`~azureml_elastic.ipc.agent_interface.EXIT_TERMINATED`. Under plain torchrun with several processes SIGTERM
reaches the ranks at different steps and no agent agrees on one: they end as they would without this library, and
continue from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
from types import FrameType
from typing import Any

from azureml_elastic.checkpoint.format.catalogue import find_newest
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointDamaged, ElasticError, Fenced
from azureml_elastic.ipc.agent_interface import EXIT_TERMINATED, Action, HeldCopies, WorkerIdentity

_LOG = logging.getLogger(__name__)

POINTER = "latest.json"


class StandaloneAgent:
    """Keeps the pointer in a file and listens for SIGTERM.

    Args:
        handles_signals: whether SIGTERM is taken for a notice, in a single process.
    """

    leave_code = EXIT_TERMINATED
    stays = False
    holds_snapshots = False

    hands_whole_over = False

    def __init__(self, storage: Storage, identity: WorkerIdentity, *, handles_signals: bool = True) -> None:
        self._storage = storage
        self._terminated = False
        self._latest: Reference | None = None
        self._attempted: Reference | None = None
        self._previous: Any = None
        main_thread = threading.current_thread() is threading.main_thread()
        self._listens = handles_signals and identity.world_size == 1 and main_thread
        if self._listens:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nobody listens, interrupts or holds anything."""

    report = restored = when_interrupted = hand_over = hold_shard = replicate_shard = park = _nothing

    def pointer(self) -> Reference | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`.

        Raises:
            CheckpointDamaged: the file is there but cannot be read, and the folder has no complete checkpoint.
        """
        problem: Exception | None = None
        try:
            self._latest = self._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = error
        if self._latest is None:
            self._latest = find_newest(self._storage)
            if self._latest is not None:
                state = "is missing" if problem is None else f"does not name a checkpoint ({problem!r})"
                _LOG.warning(
                    "%s/%s %s; the newest complete checkpoint, %s, is restored. To start anew, use another folder.",
                    self._storage, POINTER, state, self._latest.directory,
                )  # fmt: skip
            elif problem is not None:
                raise CheckpointDamaged(
                    f"{self._storage}/{POINTER} does not name a checkpoint: {problem!r}, and no complete checkpoint is "
                    "there. Restore the file, or use another folder."
                ) from problem
        return self._latest

    def _read(self) -> Reference | None:
        try:
            return Reference.from_json(json.loads(self._storage.read("", POINTER)))
        except FileNotFoundError:
            return None

    def commit(self, reference: Reference, stall_seconds: float) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        del stall_seconds
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # unreadable: it is replaced
            found = self._read()
            if found is not None and found not in (self._latest, self._attempted):
                raise Fenced(
                    f"Another run writes to {self._storage}: {POINTER} names {found.directory}, which this run has not "
                    "written. Give each run a folder of its own."
                )
        self._attempted = reference  # the pointer may name it even if an error is raised
        self._storage.replace(POINTER, json.dumps(reference.to_json()).encode() + b"\n")
        self._latest = reference  # what the next commit has to find there

    def completed(self, step: int, samples: int = 0) -> Action | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        del step, samples
        return "leave" if self._terminated else None

    def wait_interrupted(self, timeout: float) -> bool:
        """Nobody interrupts."""
        del timeout
        return False

    def held(self) -> HeldCopies:
        """Nobody has kept anything."""
        return HeldCopies()

    def wait_for_place(self) -> WorkerIdentity:
        """There is no other round.

        Raises:
            ElasticError: always.
        """
        raise ElasticError("There is no agent to wait for.")

    def close(self) -> None:
        """Give SIGTERM back."""
        if self._listens:
            signal.signal(signal.SIGTERM, self._previous)
            self._listens = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._terminated = True
