"""The part of a save for which training does not wait: files, manifest, commit, on a thread of each rank.

The order is what makes it safe:

1. every rank writes its file, with a checksum of what it writes, and makes it durable;
2. once all have, rank 0 writes the manifest, which names all files with their checksums;
3. rank 0 asks the agent to commit: one compare-and-swap, refused when a newer round has taken over;
4. only then older checkpoints are removed.

The ranks agree on a process group of their own, so that training's collectives never meet these. A round may end in the
middle of it: then :meth:`Saving.abandon` keeps this thread off the group before it is closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from azureml_elastic.checkpoints.manifest import COMMITTED, MANIFEST, Manifest
from azureml_elastic.checkpoints.retention import retire
from azureml_elastic.checkpoints.storage import FileSum, Storage
from azureml_elastic.errors import Fenced, RoundBroken, TableUnavailable
from azureml_elastic.train.agent import Agent
from azureml_elastic.train.control import Control

__all__ = ["Outcome", "Saving", "patiently"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

Kind = Literal["committed", "unavailable", "fenced", "failed", "broken"]

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)
_NICE = 5


@dataclass(frozen=True)
class Outcome:
    """What came of a save: the same on every rank, unless the round broke.

    Args:
        kind: committed; not committed because the table is away, a newer round has taken over, or a rank could not
            write; or unknown, because the round ended meanwhile.
        text: why.
    """

    kind: Kind
    text: str = ""


class Saving:
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
        control: Control,
        agent: Agent,
        stall_seconds: float,
        keep: int,
        pauses: tuple[float, ...],
    ) -> None:
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
        self._changed = threading.Condition()
        self._talking = self._abandoned = False
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, name="save-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Wait until it is over and return what came of it, ``None`` when it takes longer."""
        self._thread.join(timeout)
        return None if self._thread.is_alive() else self._outcome

    def abandon(self) -> None:
        """Keep the thread off the process group, which has been aborted and is about to be closed."""
        with self._changed:
            self._abandoned = True
            self._changed.wait_for(lambda: not self._talking)

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, AttributeError):  # training goes before
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._outcome = self._save()
        except RoundBroken as error:
            self._outcome = Outcome("broken", str(error))
        except Exception as error:  # noqa: BLE001 - collectives fail in many ways when their round is over
            self._outcome = Outcome("broken", f"{type(error).__name__}: {error}")
        finally:
            self._blocks = None

    def _save(self) -> Outcome:
        sums: dict[str, FileSum] = {}
        if self._error is None and self._blocks is not None:
            try:
                self._storage.make(self.manifest.directory)
                sums[self._name] = self._storage.write(self.manifest.directory, self._name, self._blocks)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
                self._error = f"{type(error).__name__}: {error}"
        parts = self._together(lambda: self._control.gather((self._error, sums)))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(parts) if error is not None]
        files = {name: each for _, part in parts for name, each in part.items()}
        self.manifest = replace(self.manifest, files=files)
        mine: Outcome | None = None
        if self._control.rank == 0:
            try:
                mine = self._give_up(failed) if failed else self._commit()
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
                mine = Outcome("failed", f"rank 0: {type(error).__name__}: {error}")
        return self._together(lambda: self._control.from_main(mine))

    def _give_up(self, failed: list[str]) -> Outcome:
        with contextlib.suppress(OSError):
            self._storage.remove(self.manifest.directory, MANIFEST)  # the space may be what is missing
        return Outcome("failed", f"writing failed on {len(failed)} ranks: {'; '.join(failed)}")

    def _commit(self) -> Outcome:
        try:
            self._storage.publish(self.manifest.directory, MANIFEST, self.manifest.to_bytes())
        except (OSError, ValueError) as error:  # a state that is no JSON
            return self._give_up([f"the manifest: {error}"])
        if self._abandoned:
            return Outcome("broken", "the round has ended")
        _, (kind, text) = patiently(lambda: self._agent.commit(self.manifest.reference, self._stall), self._pauses)
        if kind is not None:
            return Outcome(kind, text)
        try:
            self._storage.write(self.manifest.directory, COMMITTED, [])
            retire(self._storage, self.manifest, self._keep)
        except Exception as error:  # noqa: BLE001 - it is committed all the same
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self._storage, error)
        return Outcome("committed")

    def _together(self, action: Callable[[], T]) -> T:
        with self._changed:
            if self._abandoned:
                raise RoundBroken("the round has ended")
            self._talking = True
        try:
            return action()
        finally:
            with self._changed:
                self._talking = False
                self._changed.notify_all()


def patiently(
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
