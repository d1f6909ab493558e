"""The connection to the node's agent, which started this process and speaks JSON lines on a Unix socket.

The agent may interrupt (``interrupt``): the round is over, because a node or a worker was lost, and no collective will
complete any more. The reader thread then breaks them off, and the training loop hands its state over and exits, or,
where it may stay, waits for its place in the next round (``assign``).

The agent may announce a boundary (``prepare``): a step after which all workers of the round shall act together. The
reader thread answers at once whether this worker has yet to complete that step; when it does, the training loop waits
there for the agent's decision (``decide``), which is to act only if *all* workers have agreed. Steps without a boundary
never wait.

A worker outlives its agent by milliseconds: when the connection ends, the process exits with
:data:`~azureml_elastic.ipc.agent_interface.EXIT_AGENT_LOST`, since nothing could stop it if another round took over.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from azureml_elastic.checkpoint.format.manifest import Reference
from azureml_elastic.errors import ElasticError, Fenced, RoundBroken, TableUnavailable
from azureml_elastic.ipc import Connection, MessageClient
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST, Action, HandedOverState, WorkerIdentity
from azureml_elastic.train.agent_client.signals import end_group, leave_sigterm_to_the_agent

__all__ = ["ChannelAgent"]

_LOG = logging.getLogger(__name__)
_FLUSH_SECONDS = 5.0
_LONGEST_TEXT = 2000
_STRONGEST_FIRST: tuple[Action, ...] = ("leave", "rejoin", "save")


@dataclass
class _Boundary:
    number: int
    step: int
    action: Action
    go: bool | None = None


class ChannelAgent:
    """The node's agent at the other end of the channel.

    Args:
        path: path of the Unix socket.
        identity: rank, world size and round of this worker.
        request_timeout: seconds for the agent to reply; it asks the table in between.
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
        request_timeout: float = 60.0,
        decision_timeout: float = 60.0,
        stays: bool = False,
    ) -> None:
        self.stays = stays
        self._identity = identity
        self._request_timeout = request_timeout
        self._decision_timeout = decision_timeout
        self._changed = threading.Condition()
        self._boundaries: dict[int, _Boundary] = {}
        self._interrupted = False
        self._interrupt: Callable[[], None] = lambda: None
        self._assignment: dict[str, Any] | None = None
        self._completed: int | None = None  # until the start is known no step can be promised
        self._ended = False
        self._client = MessageClient(path, self._on_message, self._on_close)
        leave_sigterm_to_the_agent()
        self._client.send(
            {
                "op": "hello",
                "rank": identity.rank,
                "local_rank": identity.local_rank,
                "pid": os.getpid(),
                "round": identity.round,
            }
        )

    def connected(self) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "connected"})

    def pointer(self) -> Reference | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        pointer = self._ask({"op": "pointer"}).get("pointer")
        return None if pointer is None else Reference.from_json(pointer)

    def commit(self, reference: Reference, stall_seconds: float) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._ask({"op": "commit", **reference.to_json(), "seconds": stall_seconds})

    def damaged(self, directory: str, problems: str) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "damaged", "directory": directory, "problems": problems[:_LONGEST_TEXT]})

    def restored(self, step: int, directory: str | None) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._completed = step
        if self._identity.rank == 0:
            self._client.send({"op": "restored", "step": step, "directory": directory})

    def completed(self, step: int) -> Action | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._completed = step
            due = [boundary for boundary in self._boundaries.values() if boundary.step == step]
        self._client.send({"op": "step", "step": step})
        actions = {boundary.action for boundary in due if self._decision(boundary)}
        return next((action for action in _STRONGEST_FIRST if action in actions), None)

    def busy(self, *, bounded: bool = True) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "busy", "bounded": bounded})

    def free(self) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "free"})

    def expects(self, steps: int) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "expects", "steps": steps})

    def when_interrupted(self, callback: Callable[[], None]) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._interrupt = callback
            already = self._interrupted
        if already:
            callback()

    def wait_interrupted(self, timeout: float) -> bool:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._interrupted, timeout)

    def hand_over(self, step: int, descriptor: int) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._ask({"op": "handover", "pid": os.getpid(), "fd": descriptor, "step": step})

    def handed_over(self) -> HandedOverState | None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        kept = self._ask({"op": "memory"}).get("memory")
        return None if kept is None else HandedOverState(kept["path"], kept["step"], kept["round"], kept["rank"])

    def hold_shard(self, descriptor: int, description: Mapping[str, Any]) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._ask({"op": "hold_shard", "pid": os.getpid(), "fd": descriptor, "description": dict(description)})

    def retain_snapshot(self, folder: str) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "retain_snapshot", "folder": folder})

    def discard_snapshot(self, folder: str) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.send({"op": "discard_snapshot", "folder": folder})

    def held_shards(self) -> list[dict[str, Any]]:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        held: list[dict[str, Any]] = self._ask({"op": "held_shards"})["held"]
        return held

    def park(self) -> WorkerIdentity:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        with self._changed:
            self._completed = None
            self._boundaries.clear()
            self._assignment = None
        self._client.send({"op": "parked"})
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None)
        assignment: dict[str, Any] | None = self._assignment
        assert assignment is not None
        os.environ.update(assignment["environment"])
        self._identity = WorkerIdentity(
            rank=assignment["rank"],
            local_rank=self._identity.local_rank,
            world_size=assignment["world_size"],
            round=assignment["round"],
        )
        return self._identity

    def stopped(self, step: int) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._end({"op": "stopped", "step": step}, for_good=not self.stays)

    def finished(self, step: int) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._end({"op": "finished", "step": step})

    def close(self) -> None:
        """See :class:`~azureml_elastic.ipc.agent_interface.Agent`."""
        self._client.close()

    def _end(self, message: dict[str, Any], *, for_good: bool = True) -> None:
        with self._changed:
            self._ended = for_good
        self._client.send(message)
        if not self._client.flush(_FLUSH_SECONDS):
            _LOG.warning("The agent has not taken the message %r within %g s.", message["op"], _FLUSH_SECONDS)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = self._client.request(message, self._request_timeout)
        except (TimeoutError, ConnectionError) as error:
            raise TableUnavailable(f"The node's agent did not answer {message['op']!r}: {error}") from error
        failure = reply.get("error")
        if failure is None:
            return reply
        text = str(reply.get("message") or f"The node's agent answered {message['op']!r} with {failure!r}.")
        if failure == "fenced":
            raise Fenced(text)
        if failure == "unavailable":
            raise TableUnavailable(text)
        raise ElasticError(text)

    def _decision(self, boundary: _Boundary) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: boundary.go is not None or self._interrupted, self._decision_timeout)
            self._boundaries.pop(boundary.number, None)
            decided, interrupted = boundary.go is not None, self._interrupted
        if not decided and interrupted:
            raise RoundBroken(f"Round {self._identity.round} ended before a decision after step {boundary.step}.")
        if not decided:
            raise ElasticError(
                f"The node's agent announced a decision after step {boundary.step} (boundary {boundary.number}), which "
                f"did not come within {self._decision_timeout:g} s. This worker cannot know what the others do and "
                "ends; training continues from the last checkpoint. The agent's log says why."
            )
        return bool(boundary.go)

    def _on_interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            callback = self._interrupt
            self._changed.notify_all()
        callback()

    def _on_assign(self, message: dict[str, Any]) -> None:
        with self._changed:
            self._interrupted = False
            self._assignment = message
            self._changed.notify_all()

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message.get("op")
        number = int(message.get("boundary", -1))
        if kind == "prepare":
            action: Action = message["action"]
            if action not in get_args(Action):
                raise ValueError(f"unknown action {action!r}")
            with self._changed:
                step = self._completed or 0
                agreed = not self._ended and self._completed is not None and step < int(message["step"])
                if agreed:
                    self._boundaries[number] = _Boundary(number, int(message["step"]), action)
            connection.send({"op": "prepared", "boundary": number, "ok": agreed, "step": step})
        elif kind == "decide":
            with self._changed:
                boundary = self._boundaries.get(number)
                if boundary is not None:
                    boundary.go = bool(message["go"])
                    self.stays = self.stays and bool(message.get("stay", True))
                    if not boundary.go:
                        del self._boundaries[number]
                    self._changed.notify_all()
        elif kind == "interrupt":
            self._on_interrupt()
        elif kind == "assign":
            self._on_assign(message)
        else:
            _LOG.warning("The agent sent %r, which this release does not know; ignored.", kind)

    def _on_close(self, connection: Connection) -> None:
        print(
            f"azureml_elastic: the connection to the node's agent has ended ({connection.reason}); this worker exits "
            f"with {EXIT_AGENT_LOST}.",
            file=sys.stderr,
            flush=True,
        )
        end_group()
        os._exit(EXIT_AGENT_LOST)
