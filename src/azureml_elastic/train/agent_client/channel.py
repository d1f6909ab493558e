"""The connection to the node's agent, which started this process and speaks JSON lines on a Unix socket.

The agent may interrupt (``interrupt``): the round is over, because a node or a worker was lost, and no collective will
complete any more. The reader thread then breaks them off, and the training loop hands its state over and exits, or,
where it may stay, waits for its place in the next round (``assign``).

The agent may announce a boundary (``prepare``): a step after which all workers of the round shall act together. The
reader thread answers at once whether this worker has yet to complete that step; when it does, the training loop waits
there for the agent's decision (``decide``), which is to act only if *all* workers have agreed. Steps without a boundary
never wait.

A worker outlives its agent by milliseconds: when the connection ends, the process exits with
:data:`~azureml_elastic.ipc.agent_interface.EXIT_AGENT_LOST`, since nothing could stop it if another round took
over. SIGTERM is left to the agent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.environment.process import change
from azureml_elastic.errors import ElasticError, Fenced, RoundBroken, TableUnavailable
from azureml_elastic.ipc import Connection, MessageClient
from azureml_elastic.ipc import worker_messages as messages
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST, Action, HeldCopies, WorkerIdentity
from azureml_elastic.ipc.message import MalformedMessage, ShardDescription
from azureml_elastic.sigterm_filter import filter_sigterm_in_children, ignore_signal

_ROUNDS = 3
"""Searches for processes to end: those of one may have forked while it went on."""

_SHARED_MEMORY_MANAGER = "torch_shm_manager"[:15]  # as the kernel shortens names

_LOG = logging.getLogger(__name__)
_R = TypeVar("_R", bound=messages.Reply)
_FLUSH_SECONDS = 5.0
"""Time for a last report to leave the process: without it the agent would take the end for a failure."""
_REQUEST_SECONDS = 60.0
"""Time for the agent to reply, which asks the table in between."""
_TRANSFER_SECONDS = 3600.0
"""Time for the agent to send a shard to another node; it gives up much sooner where nothing moves."""
_STRONGEST_FIRST: tuple[Action, ...] = ("leave", "rejoin", "save")


def leave_sigterm_to_the_agent() -> None:
    """Ignore SIGTERM here, unless the script handles it itself, and filter it in children of ``multiprocessing``.

    One that reaches all processes of a container has reached the agent too, which knows when to leave. To be called on
    the main thread; on another one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, ignore_signal)
    filter_sigterm_in_children()


def end_group() -> None:
    """SIGKILL all other processes of the group that this process leads, as each worker of an agent does.

    For a worker that ends at once: whatever it leaves behind would hold memory and ports that the next round needs.
    """
    own = os.getpid()
    if os.getpgrp() != own or sys.platform != "linux":
        return
    # It ends by itself after the others, and takes their shared memory with it, as torch's manager does.
    janitor = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    for _ in range(_ROUNDS):
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:  # noqa: PTH208 - names, not paths
            with contextlib.suppress(OSError):
                if pid not in (own, janitor) and os.getpgid(pid) == own and not _removes_shared_memory(pid):
                    os.kill(pid, signal.SIGKILL)


def _removes_shared_memory(pid: int) -> bool:
    """Return whether a process is the one that removes tensors shared by torch's ``file_system`` strategy."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() == _SHARED_MEMORY_MANAGER


@dataclass
class _Boundary:
    number: int
    step: int
    action: Action
    go: bool | None = None


class ChannelAgent:
    """The node's agent at the other end of the channel.

    Args:
        decision_timeout: seconds for an announced decision to come. After that this worker cannot know what the
            others do, so it fails, and the round starts again from the last checkpoint.
        stays: whether this process may outlive its round.

    Raises:
        OSError: no agent listens there.
    """

    leave_code = 0

    holds_snapshots = True

    def __init__(
        self,
        path: str,
        identity: WorkerIdentity,
        *,
        decision_timeout: float = 60.0,
        stays: bool = False,
    ) -> None:
        self.stays = stays
        self._identity = identity
        self._decision_timeout = decision_timeout
        self._changed = threading.Condition()
        self._boundaries: dict[int, _Boundary] = {}
        self._interrupted = False
        self._whole = 0
        self._interrupt: Callable[[], None] = lambda: None
        self._leave: Callable[[], None] = lambda: None
        self._lost: Callable[[], None] = lambda: None
        self._assignment: messages.Assign | None = None
        self._released = False
        self._completed: int | None = None  # until the start is known no step can be promised
        self._ended = False
        # After all fields: its thread calls methods of this object from now on.
        self._client = MessageClient(path, self._on_message, self._on_close)
        leave_sigterm_to_the_agent()
        self._send(messages.Hello(identity.local_rank, identity.rank, identity.round))

    def report(self, report: messages.Report) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        ends = isinstance(report, messages.LastReport)
        with self._changed:  # the reader agrees to no further boundary, unless this process goes on in another round
            self._ended = self._ended or (ends and not (self.stays and isinstance(report, messages.Stopped)))
        self._send(report)
        if ends and not self._client.flush(_FLUSH_SECONDS):
            _LOG.warning("The agent has not taken %r within %g s.", report, _FLUSH_SECONDS)

    def pointer(self) -> Reference | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        return self._request(messages.Pointer(), messages.PointerReply).pointer

    def commit(self, reference: Reference, stall_seconds: float) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        commit = messages.Commit(reference.directory, reference.step, reference.digest, stall_seconds)
        self._request(commit, messages.Accepted)

    def restored(self, step: int, directory: str | None) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._completed = step
        if self._identity.rank == 0:
            self._send(messages.Restored(step, directory))

    def completed(self, step: int, samples: int = 0) -> Action | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        # Under one lock with the reader's vote on a boundary: a step that was promised is found to be due here, and one
        # that is completed is not promised any more.
        with self._changed:
            self._completed = step
            due = [boundary for boundary in self._boundaries.values() if boundary.step == step]
        self._send(messages.Step(step, samples))
        actions = {boundary.action for boundary in due if self._decision(boundary)}
        return next((action for action in _STRONGEST_FIRST if action in actions), None)

    @property
    def hands_whole_over(self) -> bool:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        return self._identity.local_rank == self._whole

    def when_interrupted(self, callback: Callable[[], None]) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._interrupt = callback
            already = self._interrupted
        if already:  # the round has ended before there was anybody to tell; not under the lock, which it may need
            callback()

    def when_asked_to_leave(self, callback: Callable[[], None]) -> None:
        """Call a function when the node is being preempted; for engines, as training loops leave at a step boundary."""
        self._leave = callback

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call a function, on another thread, before this process ends with its agent's connection; for engines."""
        self._lost = callback

    def wait_interrupted(self, timeout: float) -> bool:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._interrupted, timeout)

    def hand_over(self, step: int, descriptor: int, *, part: bool = False) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        of = self._identity.local_rank if part else None
        self._request(messages.HandOver(os.getpid(), descriptor, step, of), messages.Accepted)

    def hold_shard(self, descriptor: int, shard: ShardDescription) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._request(messages.HoldShard(os.getpid(), descriptor, shard), messages.Accepted)

    def replicate_shard(self, shard: ShardDescription, rank: int) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        request = messages.ReplicateShard(shard.folder, shard.file, rank)
        self._request(request, messages.Accepted, _TRANSFER_SECONDS)

    def held(self) -> HeldCopies:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        return self._request(messages.Memory(), messages.MemoryReply)

    def park(self) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._completed = None  # no step is promised before the state of the next round is restored
            self._boundaries.clear()
            self._assignment = None
        self._send(messages.Parked())

    def wait_for_place(self) -> WorkerIdentity:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or self._released)
        assignment: messages.Assign | None = self._assignment
        if assignment is None:
            raise RoundBroken("This node takes part in no further round.")
        change(assignment.environment)  # torch and the script find the new round where torchrun would set it
        self._identity = WorkerIdentity(
            assignment.rank, self._identity.local_rank, assignment.world_size, assignment.round
        )
        return self._identity

    def close(self) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.close()

    def _send(self, message: messages.WorkerMessage) -> None:
        self._client.send(messages.FROM_WORKER.encode(message))

    def _request(self, request: messages.Request, expected: type[_R], timeout: float = _REQUEST_SECONDS) -> _R:
        fields = messages.FROM_WORKER.encode(request)
        try:
            reply = messages.FROM_AGENT.decode(self._client.request(fields, timeout))
        except (TimeoutError, ConnectionError) as error:
            raise TableUnavailable(f"The node's agent did not answer {fields['op']!r}: {error}") from error
        except MalformedMessage as error:
            raise ElasticError(f"The node's agent sent a malformed reply to {fields['op']!r}: {error}") from error
        if isinstance(reply, messages.Refused):
            errors = {"fenced": Fenced, "unavailable": TableUnavailable}
            raise errors.get(reply.error, ElasticError)(reply.message)
        if not isinstance(reply, expected):
            raise ElasticError(f"The node's agent answered {fields['op']!r} with {reply!r}.")
        return reply

    def _decision(self, boundary: _Boundary) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: boundary.go is not None or self._interrupted, self._decision_timeout)
            self._boundaries.pop(boundary.number, None)
            decided, interrupted = boundary.go is not None, self._interrupted
        # A decision counts even if the round ends at the same moment: other ranks may have acted on it.
        if not decided and interrupted:
            raise RoundBroken(f"Round {self._identity.round} ended before a decision after step {boundary.step}.")
        if not decided:
            raise ElasticError(
                f"The node's agent announced a decision after step {boundary.step} (boundary {boundary.number}), which "
                f"did not come within {self._decision_timeout:g} s. This worker cannot know what the others do and "
                "ends; training continues from the last checkpoint. The agent's log says why."
            )
        return bool(boundary.go)

    def _on_interrupt(self, whole: int) -> None:
        with self._changed:
            if not self._interrupted:  # later the first ones have ended, because they have handed over
                self._interrupted, self._whole = True, whole
            callback = self._interrupt
            self._changed.notify_all()
        callback()

    def _on_message(self, connection: Connection, fields: dict[str, Any]) -> None:
        message = messages.FROM_AGENT.receive(connection, fields)
        match message:
            case messages.Prepare():
                with self._changed:  # as in completed(): a step is either promised here or known there to be due
                    step = self._completed or 0
                    agreed = not self._ended and self._completed is not None and step < message.step
                    if agreed:
                        self._boundaries[message.boundary] = _Boundary(message.boundary, message.step, message.action)
                self._send(messages.Vote(message.boundary, agreed, step))
            case messages.Decide():
                with self._changed:
                    boundary = self._boundaries.get(message.boundary)
                    if boundary is not None:
                        boundary.go = message.go
                        self.stays = self.stays and message.stay
                        if not boundary.go:
                            del self._boundaries[message.boundary]
                        self._changed.notify_all()
            case messages.Interrupt():
                self._on_interrupt(message.whole)
            case messages.Leave():
                with self._changed:
                    self._released = True
                    self._changed.notify_all()
                self._leave()
            case messages.Assign():
                with self._changed:
                    # The interruption was the last round's. One of the new round comes later, on this thread.
                    self._interrupted, self._whole = False, 0
                    self._assignment = message
                    self._changed.notify_all()

    def _on_close(self, connection: Connection) -> None:
        print(
            f"azureml_elastic: the connection to the node's agent has ended ({connection.reason}); this worker exits "
            f"with {EXIT_AGENT_LOST}.",
            file=sys.stderr,
            flush=True,
        )
        self._lost()
        end_group()
        os._exit(EXIT_AGENT_LOST)
