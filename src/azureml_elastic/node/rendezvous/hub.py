"""The hub: where the members of a round beat, and how a loss is noticed in milliseconds.

Every node listens on one port for as long as it lives. During a round all members (rank 0 included, through loopback)
hold a connection to the hub of rank 0's node and beat once a second in both directions. A broken connection is a lost
node at once, silence after ``heartbeat_timeout``. Nodes that are not members hold a connection too, as *watchers*: they
are told when the round changes and counted as waiting. Messages are JSON lines::

    member -> hub   {"op": "hello", "node", "incarnation", "round"}   {"op": "beat"}   {"op": "done"}
                    {"op": "changed"}   {"op": "report", ...}          (reports go to the agent of rank 0)
    watcher -> hub  {"op": "watch", "node", "incarnation", "round"}    {"op": "beat"}
    hub -> both     {"op": "beat"}   {"op": "changed"}                 (read the round's row again)
    hub -> member   {"op": "lost", "nodes"}   {"op": "all_done"}   and what rank 0's agent broadcasts
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from azureml_elastic.node.rendezvous.round import Round
from azureml_elastic.spec import RendezvousTimings
from azureml_elastic.wire import Connection, LineServer, listen

__all__ = ["Hub", "HubView"]


@dataclass(frozen=True)
class HubView:
    """What the hub knows about its round.

    Args:
        lost: members that are gone.
        done: members whose workers have all ended well.
        waiting: watchers with a live connection, and since when the first of them waits (monotonic seconds).
    """

    lost: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    waiting_since: float | None = None


class Hub:
    """The server side of the heartbeats.

    Args:
        host: the interface to listen on.
        timings: beats and patience.
        wake: called, from the hub's thread, when the view or the reports have changed.
    """

    def __init__(self, host: str, timings: RendezvousTimings, wake: Callable[[], None]) -> None:
        self._timings = timings
        self._wake = wake
        self._lock = threading.Lock()
        self._told = 0
        self._round: Round | None = None
        self._entered = 0.0
        self._members: dict[str, Connection] = {}
        self._lost: set[str] = set()
        self._done: set[str] = set()
        self._watchers: dict[str, tuple[Connection, float]] = {}
        self._reports: list[Mapping[str, Any]] = []
        listener = listen((host, 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._server = LineServer(
            listener,
            on_message=self._on_message,
            on_close=self._on_close,
            on_tick=self._on_tick,
            tick=timings.heartbeat_interval.total_seconds() / 2,
        )

    def enter(self, round_: Round) -> None:
        """Serve a sealed round in which this node is rank 0; forgets the one before."""
        with self._lock:
            self._round = round_
            self._entered = time.monotonic()
            self._lost, self._done = set(), set()
            self._members = {
                name: connection
                for name, connection in self._members.items()
                if connection.state.get("round") == round_.number
            }

    def changed(self, number: int = 0) -> None:
        """Tell everyone to read the round's row again.

        Args:
            number: of a round that is known to have been sealed.
        """
        with self._lock:
            self._told = max(self._told, number)
        self._server.broadcast({"op": "changed"})

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Send to every member of the round."""
        with self._lock:
            number = self._round.number if self._round else 0
            connections = [link for link in self._members.values() if link.state["round"] == number]
        for connection in connections:
            connection.send(message)

    def view(self) -> HubView:
        """Return what is known now."""
        with self._lock:
            # Members may have waited here while the round was open; they are about to say hello.
            watchers = self._watchers.keys() - self._members.keys() - self._member_names()
            since = [self._watchers[node][1] for node in watchers]
            return HubView(
                lost=frozenset(self._lost),
                done=frozenset(self._done),
                waiting=frozenset(watchers),
                waiting_since=min(since) if since else None,
            )

    def take_reports(self) -> list[Mapping[str, Any]]:
        """Return and forget the members' reports of this round, oldest first."""
        with self._lock:
            number = self._round.number if self._round else 0
            reports = [report for report in self._reports if report["round"] == number]
            self._reports = [report for report in self._reports if report["round"] > number]
            return reports

    def close(self) -> None:
        """Stop listening and drop all connections."""
        self._server.close()

    def _on_message(self, connection: Connection, message: Mapping[str, Any]) -> None:
        op = message.get("op")
        if op == "beat":
            return
        if op == "hello":
            self._hello(connection, message)
        elif op == "watch":
            connection.state.update(role="watcher", node=message["node"])
            with self._lock:
                previous = self._watchers.get(message["node"])
                self._watchers[message["node"]] = (connection, previous[1] if previous else time.monotonic())
                told = self._told
            # From here on the watcher is told of every change; what changed before, it sees when it reads now.
            if message.get("round", 0) <= told:
                connection.send({"op": "changed"})
        elif op == "changed":
            self.changed()
        elif connection.state.get("role") == "member":
            self._member_says(connection.state["node"], connection.state["round"], op, message)
        self._wake()

    def _hello(self, connection: Connection, message: Mapping[str, Any]) -> None:
        node, number = message["node"], message["round"]
        connection.state.update(role="member", node=node, round=number)
        with self._lock:
            current = self._round
            if current is not None and number < current.number:
                stale = True
            else:
                stale = False
                self._members[node] = connection
                self._watchers.pop(node, None)
        if stale:
            connection.send({"op": "changed"})

    def _member_says(self, node: str, number: int, op: object, message: Mapping[str, Any]) -> None:
        with self._lock:
            current = self._round
            if op != "done":
                self._reports.append({**message, "node": node, "round": number})
                return
            if current is None or number != current.number:
                return  # an older round's word must not count for this one
            self._done.add(node)
            everyone = self._member_names() <= self._done
        if everyone:
            self.broadcast({"op": "all_done"})

    def _on_close(self, connection: Connection) -> None:
        node = connection.state.get("node", "")
        with self._lock:
            if node in self._watchers and self._watchers[node][0] is connection:
                del self._watchers[node]
            if self._members.get(node) is not connection:
                return
            del self._members[node]
            if self._round is None or connection.state.get("round") != self._round.number:
                return
        self._lose([node])

    def _lose(self, nodes: list[str]) -> None:
        with self._lock:
            fresh = [node for node in nodes if node not in self._lost | self._done]
            self._lost.update(fresh)
        if fresh:
            self.broadcast({"op": "lost", "nodes": fresh})
            self._wake()

    def _member_names(self) -> set[str]:
        return {member.node for member in self._round.members} if self._round else set()

    def _on_tick(self) -> None:
        self._server.broadcast({"op": "beat"})
        now = time.monotonic()
        silence = self._timings.heartbeat_timeout.total_seconds()
        patience = self._timings.join_timeout.total_seconds()
        with self._lock:
            if self._round is None:
                return
            silent = [name for name, link in self._members.items() if now - link.last_heard > silence]
            # Whoever still watches is alive and only slow to read the table.
            here = self._members.keys() | self._watchers.keys()
            absent = sorted(self._member_names() - here) if now - self._entered > patience else []
            broken = [self._members[name] for name in silent]
        self._lose(silent + absent)
        for connection in broken:
            connection.close()
