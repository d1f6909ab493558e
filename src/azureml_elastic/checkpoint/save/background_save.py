"""The part of a save that runs beside training, on a thread of each rank: files, manifest, commit.

Its order leaves the last committed checkpoint intact at any time:

1. every rank writes its file durably, with a checksum;
2. rank 0 writes the manifest, which names all files with their checksums, once all ranks have written theirs;
3. rank 0 commits through the agent: one compare-and-swap, refused when a newer round has taken over;
4. only then, and when training has the outcome, are older checkpoints removed.

The threads use a control group of their own, so that their collectives never mix with those of training. When the round
ends in the middle of a task, :meth:`BackgroundTask.abandon` keeps the thread off the group before it is closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from typing_extensions import override

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, Manifest, retire
from azureml_elastic.checkpoint.save.local_shard import ShardCopy
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointError, ElasticError, Fenced, RoundBroken, TableUnavailable
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.plurals import counted

T = TypeVar("T")

_NICE = 5

_LOG = logging.getLogger(__name__)


RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)

LONG_RETRY_SECONDS = (*RETRY_SECONDS, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)
"""At the start, where training cannot begin without the committed checkpoint."""


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of a task: the same on every rank, unless the round ended meanwhile.

    Args:
        kind: ``committed`` to storage; ``kept`` in memory; not committed because the table is ``unavailable``, a newer
            round has ``fenced`` this one off or a rank ``failed``; or unknown, as the round has ``broken`` up.
        text: reason of a failure.
    """

    kind: Literal["committed", "kept", "unavailable", "fenced", "failed", "broken"]
    text: str = ""

    def error(self, what: str) -> ElasticError:
        """Return the error of a start at which this has failed."""
        if self.kind == "fenced":
            return Fenced(f"Training does not start: {self.text}")
        return CheckpointError(f"{what}: {self.text}")


@dataclass(eq=False)
class BackgroundTask(ABC):
    """A task with a copy of this rank's shard, which the training thread starts and waits for.

    Args:
        manifest: manifest without the files.
        copy: copy of this rank's shard, ``None`` where it could not be made.
        error: reason for a missing copy.
        control: control group of this thread.

    Attributes:
        file: name of this rank's file in a checkpoint.
        abandoned: whether the round has ended.
    """

    manifest: Manifest
    copy: ShardCopy | None
    error: str | None
    control: ControlGroup
    agent: Agent
    abandoned: bool = field(default=False, init=False)
    _in_collective: bool = field(default=False, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _known: threading.Event = field(default_factory=threading.Event, init=False)
    _outcome: TaskOutcome | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.file = f"rank-{self.control.rank:05}.safetensors"
        self._thread = threading.Thread(target=self._run, name=type(self).__name__.lower(), daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, timeout: float | None = None) -> TaskOutcome | None:
        """Wait for the outcome of the task and return it, ``None`` after a timeout in seconds."""
        self._known.wait(timeout)
        return self._outcome if self._known.is_set() else None

    def join(self) -> None:
        """Wait for the end of the task, which may tidy up after its outcome."""
        self._thread.join()

    def abandon(self) -> None:
        """Keep the thread off the control group, which was aborted and is about to be closed."""
        with self._changed:
            self.abandoned = True
            # A thread that is in a collective leaves it soon, as the abort makes it fail.
            self._changed.wait_for(lambda: not self._in_collective)

    @abstractmethod
    def work(self) -> TaskOutcome:
        """Run the task on its thread. An exception means that the round has broken up."""

    def tidy_up(self, outcome: TaskOutcome) -> None:  # noqa: B027 - most tasks leave nothing behind
        """Do what nobody waits for, after the outcome; without collectives."""

    def collective(self, action: Callable[[], T]) -> T:
        """Run a collective, unless the task was abandoned.

        Raises:
            RoundBroken: the round has ended.
        """
        with self._changed:
            if self.abandoned:
                raise RoundBroken("the round has ended")
            self._in_collective = True
        # Without the lock, which abandon() needs while a collective waits for a rank that is gone.
        try:
            return action()
        finally:
            with self._changed:
                self._in_collective = False
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            # Training has priority. Linux takes the number of a thread here, so that the others keep theirs.
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._outcome = self.work()
        except RoundBroken as error:
            self._outcome = TaskOutcome("broken", str(error))
        except Exception as error:  # noqa: BLE001 - collectives fail in many ways when their round ends
            self._outcome = TaskOutcome("broken", f"{type(error).__name__}: {error}")
        finally:
            self._known.set()  # before old files are removed: that may take long, and changes nothing of the outcome
        self.tidy_up(self._outcome)


def commit(
    storage: Storage,
    agent: Agent,
    manifest: Manifest,
    *,
    stall_seconds: float,
    pauses: tuple[float, ...],
    published: bool = False,
    abandoned: Callable[[], bool] = lambda: False,
) -> TaskOutcome:
    """Publish a complete manifest, unless it is, and commit the checkpoint. For rank 0; :func:`remove_older` follows.

    While the table is unavailable, the commit is tried again after each of the pauses in seconds. Nothing is committed
    once the round has ended (``abandoned``). Where the folder has been removed meanwhile, the outcome is ``failed``, so
    that another checkpoint is taken.
    """
    try:
        if not published:
            storage.publish(manifest.directory, MANIFEST, manifest.to_bytes())
    except (OSError, ValueError) as error:  # ValueError: the state is no JSON
        return discard(storage, manifest.directory, f"writing the manifest failed: {error}")
    if abandoned():
        return TaskOutcome("broken", "the round has ended")
    failure = retry_while_unavailable(lambda: agent.commit(manifest.reference, stall_seconds), pauses)
    if failure is not None:
        return failure
    try:
        # After the commit: where the table is lost, the marker vouches for it.
        storage.write(manifest.directory, COMMITTED, [])
    except FileNotFoundError:
        return TaskOutcome("failed", f"the folder {manifest.directory} was removed while it was committed")
    except Exception as error:  # noqa: BLE001 - the checkpoint is committed all the same
        _LOG.warning("The checkpoint %s/%s is committed, but not marked so: %s", storage, manifest.directory, error)
    return TaskOutcome("committed")


def commit_before_restore(
    storage: Storage,
    control: ControlGroup,
    agent: Agent,
    manifest: Manifest | None,
    *,
    keep: int | None = None,
    pauses: tuple[float, ...] = LONG_RETRY_SECONDS,
) -> Reference | None:
    """Commit what is restored next, so that it cannot be lost again. A collective.

    Args:
        manifest: manifest of its checkpoint, if there is one; that of rank 0 counts.
        keep: number of committed checkpoints to keep, ``None`` where the manifest is published already.

    Raises:
        CheckpointError: it could not be committed.
        Fenced: a newer round has taken over.
    """
    outcome: TaskOutcome | None = None
    if control.rank == 0 and manifest is not None:
        outcome = commit(storage, agent, manifest, stall_seconds=0.0, pauses=pauses, published=keep is None)
        if outcome.kind == "committed":
            _LOG.warning("The state of step %d in memory is committed as %s.", manifest.step, manifest.directory)
            if keep is not None:
                remove_older(storage, manifest, keep)
    found: tuple[Reference | None, TaskOutcome | None]
    found = control.from_main((None if manifest is None else manifest.reference, outcome))
    reference, outcome = found
    if outcome is not None and outcome.kind != "committed":
        raise outcome.error(f"The state in memory, kept in {storage}, could not be committed")
    return reference


def remove_older(storage: Storage, manifest: Manifest, keep: int) -> None:
    """Remove all checkpoints of the run but ``keep``, if this one is committed and marked so. For rank 0 alone."""
    try:
        # One without a marker is not found again if the pointer is lost: the older ones are still needed then.
        if storage.size(manifest.directory, COMMITTED) is not None:
            retire(storage, manifest, keep)
    except Exception as error:  # noqa: BLE001 - the checkpoint is committed all the same
        _LOG.warning("Old checkpoints in %s could not be removed: %s", storage, error)


def discard(storage: Storage, directory: str, reason: str) -> TaskOutcome:
    """Remove a failed attempt, as a full disk may be why it failed, and return its outcome."""
    with contextlib.suppress(OSError):
        storage.remove(directory, MANIFEST)
    return TaskOutcome("failed", reason)


def retry_while_unavailable(action: Callable[[], T], pauses: tuple[float, ...]) -> T | TaskOutcome:
    """Call the agent, again after each pause while the table is unavailable; return the result or the failure."""
    for pause in (*pauses, None):
        try:
            return action()
        except Fenced as error:
            return TaskOutcome("fenced", str(error))
        except TableUnavailable as error:
            if pause is None:
                return TaskOutcome("unavailable", str(error))
            time.sleep(pause)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            return TaskOutcome("failed", f"{type(error).__name__}: {error}")
    raise AssertionError


@dataclass(eq=False)
class SaveTask(BackgroundTask):
    """One save in progress.

    Args:
        keep: number of committed checkpoints to keep.
        stall_seconds: time that training waited for the copy.
        pauses: seconds between attempts to commit while the table is unavailable.
    """

    storage: Storage
    keep: int
    stall_seconds: float
    pauses: tuple[float, ...]

    @override
    def work(self) -> TaskOutcome:
        sums = self._write()
        parts = self.collective(lambda: self.control.gather((self.error, sums)))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(parts) if error is not None]
        # On all ranks: each refers to this checkpoint by the digest of its manifest, as the next one's parent.
        self.manifest = replace(self.manifest, files={name: each for _, part in parts for name, each in part.items()})
        outcome: TaskOutcome | None = None
        # Only once the gathering has shown that every rank's file is durable: the manifest vouches for all of them.
        if self.control.rank == 0:
            try:
                outcome = self._finish(failed)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
                outcome = TaskOutcome("failed", f"rank 0: {type(error).__name__}: {error}")
        return self.collective(lambda: self.control.from_main(outcome))

    @override
    def tidy_up(self, outcome: TaskOutcome) -> None:
        if self.control.rank == 0 and outcome.kind == "committed":
            remove_older(self.storage, self.manifest, self.keep)

    def _write(self) -> dict[str, FileSum]:
        folder = self.manifest.directory
        try:
            if self.copy is not None and not self.copy.empty:
                self.storage.make(folder)
                return {self.file: self.storage.write(folder, self.file, [self.copy.buffer.view(0, self.copy.nbytes)])}
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            self.error = f"{type(error).__name__}: {error}"
        return {}

    def _finish(self, failed: list[str]) -> TaskOutcome:
        if failed:
            reason = f"writing failed on {counted(len(failed), 'rank')}: {'; '.join(failed)}"
            return discard(self.storage, self.manifest.directory, reason)
        return commit(
            self.storage,
            self.agent,
            self.manifest,
            stall_seconds=self.stall_seconds,
            pauses=self.pauses,
            abandoned=lambda: self.abandoned,
        )
