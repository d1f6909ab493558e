"""The hub: where the members of a round beat, and where nodes outside learn what becomes of it.

Every node listens on one port for as long as it lives. During a round all members (rank 0 included, through loopback)
hold a connection to the hub of rank 0's node and beat once a second in both directions. A broken connection is a lost
node at once, silence after ``heartbeat_timeout``. Nodes that are not members hold a connection too, as *watchers*:
those that wait beside the round are made room for, those that wait for an open round are told who of them should seal
it, and all of them are told of every move of the round. Messages are JSON lines::

    member -> hub   {"op": "hello", "to", "node", "incarnation", "round"}   {"op": "beat"}   {"op": "done"}
                    {"op": "changed", "row"}   {"op": "report", ...}       (reports go to the agent of rank 0)
                    {"op": "unreachable", "text"}   {"op": "reaches", "incarnation"}             (gaps: new and closed)
    watcher -> hub  {"op": "watch", "to", "node", "incarnation", "strikes", "unreached", "round", "open", "candidacy"}
                    {"op": "beat"}
    anyone -> hub   {"op": "ask", "to", "round"}     (has this hub's node reached rank 0's?)
    hub -> both     {"op": "beat"}   {"op": "changed", "row"}              (without a row: read it in the table)
    hub -> watcher  {"op": "line", "place", "apart"}  (place 0: it should seal; 1 and more: it should be ready to; null:
                    neither. apart: members that cannot reach it, for which no room is made)
    hub -> anyone   {"op": "answer", "linked"}       (null: it does not know yet)
    hub -> member   {"op": "lost", "nodes", "absent"}   {"op": "all_done"}   and what rank 0's agent broadcasts
                    (absent: those of them that have never come)

``to`` is the incarnation that the sender means: the port of a node that has died may serve another run by now.
``round`` and ``open`` say which version of the row a watcher has seen, and ``row`` is a packed one, see
:mod:`~azureml_elastic.node.rendezvous.state.round_codec`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import Connection
from azureml_elastic.node.rendezvous.hub.pause_detection import PauseDetector
from azureml_elastic.node.rendezvous.hub.state import HubState
from azureml_elastic.node.rendezvous.hub.watchers import HubView, Watcher
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import pack, unpack

__all__ = ["Hub", "HubView"]

_LOG = logging.getLogger(__name__)

_WATCHERS_PATIENCE = 3
"""How many times longer than a member a watcher may be silent: nobody waits for its answers."""


class Hub:
    """The server side of the heartbeats.

    Args:
        host: the interface to listen on.
        timings: beats and patience.
        wake: called, from the hub's thread, when the view or the reports have changed.
        incarnation: of this node; greetings that are meant for another one are refused. Empty to take all.
        machine: to listen on.
        bar: the number of strikes from which on no room is made for a node; ``None`` for never.
    """

    def __init__(
        self,
        host: str,
        timings: RendezvousTimings,
        wake: Callable[[], None],
        incarnation: str = "",
        machine: Runtime | None = None,
        bar: int | None = None,
    ) -> None:
        machine = machine or Runtime()
        self._timings = timings
        self._wake = wake
        self._incarnation = incarnation
        self._bar = bar
        self._clock = machine.clock
        self._lock = threading.Lock()
        self._reception = HubState(machine.clock)
        self._hint = False
        self._round: Round | None = None
        self._entered = 0.0
        self._members: dict[str, Connection] = {}
        self._lost: set[str] = set()
        self._absent: set[str] = set()
        self.linked: Callable[[int], bool | None] = lambda _: None
        """Returns whether this node has reached rank 0's of a round; for whoever made the hub to set."""
        self._done: set[str] = set()
        self._reports: list[Mapping[str, Any]] = []
        listener = machine.listen(host, 4096)
        self.port: int = listener.getsockname()[1]
        tick = timings.heartbeat_interval.total_seconds() / 2
        self._attention = PauseDetector(machine.clock, tick)
        with self._lock:  # on a busy machine it may tick before it is known here
            self._server = machine.serve(listener, self._on_message, self._on_close, self._on_tick, tick)

    def enter(self, round_: Round) -> None:
        """Serve a sealed round in which this node is rank 0; forgets the one before."""
        with self._lock:
            self._round = round_
            self._entered = self._clock()
            self._lost, self._absent, self._done = set(), set(), set()
            apart = self._reception.watchers.enter(round_)
            self._members = {
                name: connection
                for name, connection in self._members.items()
                if connection.state.get("round") == round_.number
            }
        self.changed(round_)
        for connection, names in apart:
            connection.send({"op": "line", "place": None, "apart": names})

    def stand(self, round_: Round, me: Member) -> None:
        """Take note that this node is itself a candidate of an open round."""
        with self._lock:
            self._reception.stand(round_, me)
        self._call()

    @property
    def newest(self) -> Round | None:
        """The newest version of the round's row that this hub has told or was told, ``None`` before the first."""
        return self._reception.newest

    def should_seal(self) -> bool:
        """Return whether this node is one of those that should look after the open round, as far as this hub knows."""
        with self._lock:
            return self._reception.should_seal()

    def take_hint(self) -> bool:
        """Return, once, whether a member knows of a sealed round that this hub was never told: read the row."""
        with self._lock:
            hint, self._hint = self._hint, False
            return hint

    def candidates(self) -> list[Member]:
        """Return what watchers have said that they are, each of which had written its row before."""
        with self._lock:
            return self._reception.watchers.candidates()

    def changed(self, round_: Round | None = None) -> None:
        """Tell everyone that the round has moved.

        Args:
            round_: to what; ``None`` where everyone must read that in the table.
        """
        if round_ is not None:
            with self._lock:
                if not self._reception.learn(round_):
                    return
        if self._server.connections:
            self._server.broadcast(_changed(round_))

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
            waiting = self._reception.watchers.waiting(self._members.keys() | self._member_names(), self._bar)
            since = waiting.values()
            return HubView(
                lost=frozenset(self._lost),
                absent=frozenset(self._absent),
                done=frozenset(self._done),
                waiting=frozenset(waiting),
                waiting_since=min(since, default=None),
                waiting_latest=max(since, default=None),
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
        if op in ("hello", "watch", "ask") and message.get("to", self._incarnation) != self._incarnation:
            connection.close("it is meant for another process, whose port this was")
            return
        if op == "hello":
            self._hello(connection, message)
        elif op == "watch":
            self._watch(connection, message)
        elif op == "ask":
            connection.send({"op": "answer", "linked": self.linked(message["round"])})
            return
        elif op == "changed":
            self.changed(unpack(message["row"]) if "row" in message else None)
        elif connection.state.get("role") == "member":
            self._member_says(connection.state["node"], connection.state["round"], op, message)
        self._wake()

    def _hello(self, connection: Connection, message: Mapping[str, Any]) -> None:
        node, number = message["node"], message["round"]
        connection.state.update(role="member", node=node, round=number)
        with self._lock:
            if self._round is None or number >= self._round.number:
                self._members[node] = connection
                self._reception.watchers.remove(node)
            seen = Round(number, "sealed")
            missed, unheard = self._reception.missed(seen), self._reception.hint(seen)
            self._hint = self._hint or unheard
        # From here on the member is told of every change; this is what it may have missed.
        if missed is not None:
            connection.send(_changed(missed))
        if unheard:
            self.changed()  # whoever has sealed that round has not told this hub, or its word was lost

    def _watch(self, connection: Connection, message: Mapping[str, Any]) -> None:
        node = message["node"]
        candidacy = Member.from_value(message["candidacy"]) if message.get("candidacy") else None
        number, is_open = message.get("round", 0), message.get("open", False)
        connection.state.update(role="watcher", node=node, place=None)
        watcher = Watcher(
            connection,
            self._clock(),
            beside=0 if is_open else number,
            candidacy=candidacy,
            strikes=message.get("strikes", 0),
            incarnation=message.get("incarnation", ""),
            unreached=frozenset(message.get("unreached", ())),
        )
        with self._lock:
            self._reception.watch(node, watcher)
            missed = self._reception.missed(Round(number, "open" if is_open else "sealed"))
            apart = sorted(self._reception.watchers.unreached_by(watcher))
        if missed is not None:
            connection.send(_changed(missed))
        # Whatever it is answered, it knows that it was heard.
        connection.send({"op": "line", "place": None, **({"apart": apart} if apart else {})})
        self._call()

    def _call(self) -> None:
        """Tell those that should look after the open round that they should."""
        with self._lock:
            calls = self._reception.calls()
        for connection, place in calls:
            connection.send({"op": "line", "place": place})

    def _member_says(self, node: str, number: int, op: object, message: Mapping[str, Any]) -> None:
        if op == "unreachable":
            _LOG.warning("%s.", message["text"])
            return
        with self._lock:
            current = self._round
            if op == "reaches":
                self._reception.watchers.reached(message["incarnation"], node)
                return
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
            first_left = self._reception.leave(node, connection)
        if first_left:
            self._call()
            self._wake()
        with self._lock:
            if self._members.get(node) is not connection:
                return
            del self._members[node]
            if self._round is None or connection.state.get("round") != self._round.number:
                return
        self._lose([node])

    def _lose(self, nodes: Iterable[str], absent: Collection[str] = ()) -> None:
        with self._lock:
            fresh = [node for node in nodes if node not in self._lost | self._done]
            never_came = [node for node in fresh if node in absent]
            self._lost.update(fresh)
            self._absent.update(never_came)
        if fresh:
            self.broadcast({"op": "lost", "nodes": fresh, "absent": never_came})
            self._wake()

    def _member_names(self) -> set[str]:
        return {member.node for member in self._round.members} if self._round else set()

    def _on_tick(self) -> None:
        self._attention.look()
        silence = self._attention.silence
        timeout = self._timings.heartbeat_timeout.total_seconds()
        patience = self._timings.join_timeout.total_seconds()
        with self._lock:
            server, watchers = self._server, self._reception.watchers.connections()
            gone = [link for link in watchers if silence(link.last_heard) > _WATCHERS_PATIENCE * timeout]
        server.broadcast({"op": "beat"})
        for connection in gone:
            connection.close("silent")
        with self._lock:
            if self._round is None:
                return
            silent = [name for name, link in self._members.items() if silence(link.last_heard) > timeout]
            # Whoever still watches is alive and only slow to read the table.
            here = self._members.keys() | self._reception.watchers.names()
            absent = sorted(self._member_names() - here) if silence(self._entered) > patience else []
            broken = [self._members[name] for name in silent]
        self._lose(silent + absent, absent)
        for connection in broken:
            connection.close()


def _changed(round_: Round | None) -> dict[str, Any]:
    return {"op": "changed"} if round_ is None else {"op": "changed", "row": pack(round_)}
