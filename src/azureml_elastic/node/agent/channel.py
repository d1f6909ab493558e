"""The agent's side of the channel to its workers: a Unix socket that the training session connects to.

Workers never access the table. They report their steps to the agent, request the committed checkpoint, request commits
of new ones, and receive the step at which to save or to leave. A script without a session never connects, and is
restarted at each change as under torchrun. The messages are listed in ``docs/explanation/step-boundary.md``.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.checkpoint.snapshots.local_snapshots import LocalSnapshots
from azureml_elastic.errors import ElasticError, Fenced
from azureml_elastic.ipc import Connection, MessageServer, listen
from azureml_elastic.ledger.events import CheckpointCommitted, CheckpointQuarantined, Progress, Restored
from azureml_elastic.node.agent.event_recorder import Recorder
from azureml_elastic.node.agent.step_boundary import BoundaryVote
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer

__all__ = ["Channel"]

_LOG = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.05
_LONGEST_FOLDER_BYTES = 70


class Channel:
    """Serves the local workers. Its methods are for the agent's thread.

    Args:
        recorder: writer of the ledger's events.
        wake: called, from the channel's thread, when something has changed.
        watch: detector of hanging workers.
        local: copies of the state on this node's disk, if there are any.

    Attributes:
        ended_well: whether the run has, so that nothing on the disk is needed any more.
    """

    def __init__(
        self, recorder: Recorder, wake: Callable[[], None], watch: HangDetector, local: LocalSnapshots | None = None
    ) -> None:
        self._recorder = recorder
        self._watch = watch
        self._wake = wake
        self._lock = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="elastic-", dir=_folder_for_sockets())
        self.folder = Path(self._folder)
        """On a local disk; the workers may put files there."""
        self.path = str(self.folder / "agent.sock")
        self._round = 0
        self._size = 0
        self._pointer: CheckpointPointer | None = None
        self._workers: dict[int, Connection] = {}
        self._greeted: set[int] = set()
        self._parked: set[int] = set()
        self._stopped: set[int] = set()
        self._finished: set[int] = set()
        self._connected = False
        self._step = 0
        self._expected: int | None = None
        self._began: tuple[float, int] | None = None
        self._memories = AgentMemory(local)
        self.ended_well = False
        self.trained = False
        """Whether a local worker has completed a step in this round."""
        self._recorded = 0.0
        self._ballot: BoundaryVote | None = None
        self._reports: list[dict[str, Any]] = []
        self._table_calls = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-row")
        self._server = MessageServer(listen(self.path), self._on_message, self._on_close)

    def begin(self, number: int, size: int, pointer: CheckpointPointer | None, *, keep: bool = False) -> None:
        """Serve a new round's workers; what is left of older ones is cut off.

        Args:
            number: number of the round.
            size: how many workers this node has.
            pointer: the checkpoint's row in the table, on rank 0's node only.
            keep: whether the workers that have parked stay, to be assigned to this round.
        """
        if not keep:
            self.cut()
        with self._lock:
            self._round, self._size, self._pointer = number, size, pointer
            if not keep:
                self._workers, self._greeted, self._parked = {}, set(), set()
            self._stopped, self._finished = set(), set()
            self._connected = False
            self._step, self._began, self._ballot, self._reports = 0, None, None, []
            self.trained = False
        if pointer is not None:
            self._table_calls.submit(_quietly, pointer.take_over)

    def assign(self, places: Mapping[int, Mapping[str, Any]]) -> None:
        """Send the parked workers their assignments in the round.

        Args:
            places: ``rank``, ``world_size`` and ``environment`` of each local rank.
        """
        with self._lock:
            number, pointer = self._round, self._pointer
            # One that has died meanwhile is found by its exit code.
            targets = [(self._workers[rank], place) for rank, place in places.items() if rank in self._workers]
            self._parked.clear()
        for connection, place in targets:
            connection.state.update(round=number, pointer=pointer, rank=place["rank"])
            connection.send({"op": "assign", "round": number, **place})

    def interrupt(self) -> None:
        """Notify the workers that their round is over: they hand their state over, or park."""
        with self._lock:
            targets = [link for rank, link in self._workers.items() if rank not in self._stopped | self._parked]
        for connection in targets:
            connection.send({"op": "interrupt"})

    def cut(self) -> None:
        """Cut off the workers: a session whose agent is gone ends its process at once."""
        with self._lock:
            workers = list(self._workers.values())
        for connection in workers:
            connection.close("its round is over")

    @property
    def step(self) -> int:
        """The furthest step that a local worker has completed in this round."""
        with self._lock:
            return self._step

    @property
    def stopped(self) -> frozenset[int]:
        """The local ranks that have saved and left at an agreed boundary."""
        with self._lock:
            return frozenset(self._stopped)

    @property
    def parked(self) -> frozenset[int]:
        """The local ranks that wait for a place in a round."""
        with self._lock:
            return frozenset(self._parked)

    @property
    def seconds_left(self) -> float | None:
        """For how long training will go on at its pace, ``None`` where that is not known."""
        with self._lock:
            if self._expected is None or self._began is None:
                return None
            began, first = self._began
            steps = self._step - first
            pace = (time.monotonic() - began) / steps if steps else 0.0
            return max(0, self._expected - self._step) * pace if steps else None

    @property
    def finished(self) -> frozenset[int]:
        """The local ranks whose training has ended."""
        with self._lock:
            return frozenset(self._finished)

    @property
    def in_session(self) -> bool:
        """Whether every local worker has a session."""
        with self._lock:
            return len(self._greeted) == self._size

    @property
    def placed(self) -> bool:
        """Whether every local worker has a session that knows its place in this round."""
        with self._lock:
            links = self._workers.values()
            return len(links) == self._size and all(link.state["round"] == self._round for link in links)

    @property
    def connected(self) -> bool:
        """Whether the ranks of this round have found each other, as far as local workers have reported."""
        with self._lock:
            return self._connected

    @property
    def leaving(self) -> bool:
        """Whether a worker is connected that ends by itself once it is interrupted; those that wait do not."""
        with self._lock:
            return bool(self._workers.keys() - self._parked)

    def prepare(self, message: Mapping[str, Any]) -> None:
        """Pass a proposal on to the workers; the node's report follows in :meth:`take_reports`."""
        with self._lock:
            voters = frozenset(self._workers) if len(self._workers) == self._size else frozenset()
            self._ballot = BoundaryVote(message["boundary"], voters)
            targets = list(self._workers.values()) if voters else []
            if not voters:
                self._reports.append(self._ballot.report(finished=bool(self._finished)))
                self._ballot = None
        for connection in targets:
            connection.send(message)
        self._wake()

    def decide(self, message: Mapping[str, Any]) -> None:
        """Pass a decision on to the workers.

        Args:
            message: the decision; ``stay`` says whether this node will be in the next round.
        """
        with self._lock:
            targets = list(self._workers.values())
        for connection in targets:
            connection.send(message)

    def take_reports(self) -> list[dict[str, Any]]:
        """Return and forget the node's answers to proposals."""
        with self._lock:
            reports, self._reports = self._reports, []
            return reports

    def close(self) -> None:
        """Stop serving; workers that still run will exit."""
        self._server.close()
        self._table_calls.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._memories.close(forget=self.ended_well)

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "hello":
            self._hello(connection, message)
            return
        local_rank = connection.state.get("local_rank")
        if local_rank is None or self._workers.get(local_rank) is not connection:
            connection.close("it did not say hello first, or its round is over")
            return
        if op == "parked":
            with self._lock:
                self._parked.add(local_rank)
            self._wake()
        elif op in AgentMemory.OPS:
            reply = self._memories.answer(message, connection.state["round"], connection.state["rank"])
            if reply is not None:
                connection.send({"re": message["id"], **reply})
        elif op == "expects":
            self._expected = message["steps"]
        elif connection.state["round"] != self._round:
            connection.close("its round is over")
        elif op == "connected":
            with self._lock:
                self._connected = True
        elif op == "step":
            self._completed(local_rank, message["step"])
        elif op == "pointer":
            self._table_calls.submit(self._answer_pointer, connection, message)
        elif op == "commit":
            self._table_calls.submit(self._answer_commit, connection, message)
        elif op == "prepared":
            self._voted(local_rank, message)
        elif op == "busy":
            self._watch.busy(local_rank, bounded=message["bounded"])
        elif op == "free":
            self._watch.free(local_rank)
        elif op == "damaged":
            self._recorder.record(
                CheckpointQuarantined, self._round, directory=message["directory"], problems=message["problems"]
            )
        elif op == "restored":
            self._watch.opened()
            with self._lock:
                self._step = max(self._step, message["step"])
                self._began = time.monotonic(), message["step"]
            self._recorder.record(Restored, self._round, step=message["step"], directory=message["directory"])
        elif op in ("stopped", "finished"):
            with self._lock:
                (self._stopped if op == "stopped" else self._finished).add(local_rank)
                self._step = max(self._step, message["step"])
            self._watch.finished()
            self._recorder.record(Progress, self._round, step=message["step"])
            self._wake()
        else:
            _LOG.warning("A worker sent %r, which this agent does not know.", op)

    def _hello(self, connection: Connection, message: Mapping[str, Any]) -> None:
        with self._lock:
            # A worker of round 0 receives its assignment later.
            current = message["round"] in (self._round, 0)
            if current:
                connection.state.update(
                    local_rank=message["local_rank"],
                    rank=message["rank"],
                    round=message["round"],
                    pointer=self._pointer,
                )
                self._workers[message["local_rank"]] = connection
                self._greeted.add(message["local_rank"])
        if not current:
            connection.close(f"round {message['round']} is over")
        elif message["round"]:
            self._watch.opened()

    def _completed(self, local_rank: int, step: int) -> None:
        self._watch.completed(step, local_rank)
        self._memories.completed(self._round)
        with self._lock:
            self.trained = True
            if self._began is None:
                self._began = time.monotonic(), step
            self._step = max(self._step, step)
            now = time.monotonic()
            due = now - self._recorded >= _PROGRESS_SECONDS
            if due:
                self._recorded = now
        if due:
            self._recorder.record(Progress, self._round, step=step)

    def _voted(self, local_rank: int, message: Mapping[str, Any]) -> None:
        with self._lock:
            vote = self._ballot
            if vote is None or vote.boundary != message["boundary"]:
                return
            if vote.vote(local_rank, ok=message["ok"], step=message["step"]):
                self._reports.append(vote.report(finished=bool(self._finished)))
                self._ballot = None
        self._wake()

    def _on_close(self, connection: Connection) -> None:
        local_rank = connection.state.get("local_rank")
        with self._lock:
            if local_rank is not None and self._workers.get(local_rank) is connection:
                del self._workers[local_rank]
                self._parked.discard(local_rank)
        self._wake()

    def _answer_pointer(self, connection: Connection, message: Mapping[str, Any]) -> None:
        reply: dict[str, Any] = {"re": message["id"]}
        try:
            reply["pointer"] = _pointer_of(connection).take_over()
        except Exception as error:  # noqa: BLE001 - the worker waits for an answer, whatever has happened
            reply.update(_refusal(error))
        connection.send(reply)

    def _answer_commit(self, connection: Connection, message: Mapping[str, Any]) -> None:
        reply: dict[str, Any] = {"re": message["id"]}
        pointer = {name: message[name] for name in ("directory", "step", "digest")}
        try:
            _pointer_of(connection).commit(pointer)
            reply["ok"] = True
        except Exception as error:  # noqa: BLE001 - the worker waits for an answer, whatever has happened
            reply.update(_refusal(error))
        connection.send(reply)
        if "ok" in reply:
            self._recorder.record(
                CheckpointCommitted,
                self._round,
                step=message["step"],
                directory=message["directory"],
                seconds=message["seconds"],
            )


def _pointer_of(connection: Connection) -> CheckpointPointer:
    """Return the pointer of the round that the worker belongs to, however many rounds have passed since."""
    pointer: CheckpointPointer | None = connection.state["pointer"]
    if pointer is None:
        raise Fenced("This node is not rank 0 of its round; only rank 0's workers commit checkpoints.")
    return pointer


def _folder_for_sockets() -> str | None:
    """Return where to put a socket: the path of one has at most 107 bytes, and temporary folders may lie deep."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER_BYTES:
        return None
    return "/tmp"  # noqa: S108 - mkdtemp makes a private folder in it


def _refusal(error: Exception) -> dict[str, Any]:
    if not isinstance(error, ElasticError):
        _LOG.error("A request of a worker failed.", exc_info=error)
    return {"error": "fenced" if isinstance(error, Fenced) else "unavailable", "message": str(error)}


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except ElasticError as error:
        _LOG.info("%s", error)
