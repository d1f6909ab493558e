"""The part of a save for which training does not wait: files, manifest, commit, on a thread of each rank.

The order is what makes it safe:

1. every rank writes its file, with a checksum of what it writes, and makes it durable;
2. once all have, rank 0 writes the manifest, which names all files with their checksums;
3. rank 0 asks the agent to commit: one compare-and-swap, refused when a newer round has taken over;
4. only then older checkpoints are removed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, Manifest
from azureml_elastic.checkpoint.format.retention import retire
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.distributed.background_task import BackgroundTask, Kind, TaskOutcome
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import Agent

__all__ = ["LONG_RETRY_SECONDS", "RETRY_SECONDS", "SaveTask", "retry_while_unavailable"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)

LONG_RETRY_SECONDS = (*RETRY_SECONDS, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)
"""Without the committed checkpoint training cannot start; with a new one that has to wait, it goes on."""


class SaveTask(BackgroundTask):
    """One save under way. Made and waited for by the training thread.

    Args:
        storage: of the checkpoints.
        manifest: as far as it is known, without the files.
        name: of this rank's file.
        blocks: its content, ``None`` where this rank writes nothing.
        error: why this rank cannot write, where that is known already.
        control: the ranks' agreement, of this thread alone.
        agent: that keeps the pointer.
        stall_seconds: for which training has waited.
        keep: committed checkpoints to keep.
        pauses: between attempts to commit while the table is away, in seconds.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        name: str,
        blocks: Iterable[bytes | memoryview] | None,
        error: str | None,
        *,
        control: ControlGroup,
        agent: Agent,
        stall_seconds: float,
        keep: int,
        pauses: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.manifest = manifest
        self._storage = storage
        self._name = name
        self._blocks = blocks
        self._error = error
        self._control = control
        self._agent = agent
        self._stall = stall_seconds
        self._keep = keep
        self._pauses = pauses

    def work(self) -> TaskOutcome:
        """Write, and commit."""
        try:
            return self._save()
        finally:
            self._blocks = None

    def _save(self) -> TaskOutcome:
        sums: dict[str, FileSum] = {}
        if self._error is None and self._blocks is not None:
            try:
                self._storage.make(self.manifest.directory)
                sums[self._name] = self._storage.write(self.manifest.directory, self._name, self._blocks)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
                self._error = f"{type(error).__name__}: {error}"
        parts = self.together(lambda: self._control.gather((self._error, sums)))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(parts) if error is not None]
        files = {name: each for _, part in parts for name, each in part.items()}
        self.manifest = replace(self.manifest, files=files)
        mine: TaskOutcome | None = None
        if self._control.rank == 0:
            try:
                mine = self._give_up(failed) if failed else self._commit()
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
                mine = TaskOutcome("failed", f"rank 0: {type(error).__name__}: {error}")
        return self.together(lambda: self._control.from_main(mine))

    def _give_up(self, failed: list[str]) -> TaskOutcome:
        with contextlib.suppress(OSError):
            self._storage.remove(self.manifest.directory, MANIFEST)  # the space may be what is missing
        return TaskOutcome("failed", f"writing failed on {len(failed)} ranks: {'; '.join(failed)}")

    def _commit(self) -> TaskOutcome:
        try:
            self._storage.publish(self.manifest.directory, MANIFEST, self.manifest.to_bytes())
        except (OSError, ValueError) as error:  # a state that is no JSON
            return self._give_up([f"the manifest: {error}"])
        if self.abandoned:
            return TaskOutcome("broken", "the round has ended")
        _, (kind, text) = retry_while_unavailable(
            lambda: self._agent.commit(self.manifest.reference, self._stall), self._pauses
        )
        if kind is not None:
            return TaskOutcome(kind, text)
        try:
            self._storage.write(self.manifest.directory, COMMITTED, [])
            retire(self._storage, self.manifest, self._keep)
        except Exception as error:  # noqa: BLE001 - it is committed all the same
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self._storage, error)
        return TaskOutcome("committed")


def retry_while_unavailable(
    action: Callable[[], T], pauses: tuple[float, ...], sleep: Callable[[float], None] = time.sleep
) -> tuple[T | None, tuple[Kind | None, str]]:
    """Call the agent, again while the table is away, and return its answer and how it failed, if it did."""
    for pause in (*pauses, None):
        try:
            return action(), (None, "")
        except Fenced as error:
            return None, ("fenced", str(error))
        except TableUnavailable as error:
            if pause is None:
                return None, ("unavailable", str(error))
            sleep(pause)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
            return None, ("failed", f"{type(error).__name__}: {error}")
    raise AssertionError
