"""Probes of which members of a running round reach each other, and whether unreachable pairs have recovered.

Agents need to reach rank 0's node only, but workers connect to all other workers, and hang without an error where two
nodes cannot reach each other. So a second after a round has begun each node connects once to the hub of each other
member, on a separate thread: in a large round to the next one in the order of ranks and to some others at random. A
node that was reached once is not probed again. With a port range, hubs do not show whether the ports of workers can be
reached, since NCCL and gloo use any free port: each node then also listens on such a port.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from azureml_elastic.errors import NodeLeaving
from azureml_elastic.ipc import Connection
from azureml_elastic.node.core.messages import Reached
from azureml_elastic.node.core.node import Node
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.host.addresses import Ports
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.link import Assignment, Membership
from azureml_elastic.node.rendezvous.reachability import Reachability, Target, is_unreachable

_DELAY_SECONDS = 1.0
"""Time after the start of the round, at which workers are being started."""

_PROBE_SECONDS = 2.0
_TRIES = 2

_RETRY_SECONDS = (5.0, 60.0)
"""First and longest pause between two attempts at an unreachable pair."""

_ALL = 32
"""Largest round in which every member probes every other one."""

_SAMPLE = 8

_PURPOSES: dict[Target, str] = {
    "peer_hub": "a member of round {}, to which the workers here connect",
    "worker_port": "a member of round {}, on a port such as its workers take",
}


def peers_to_probe(
    members: Sequence[Member], rank: int, reached: Collection[str], choose: random.Random
) -> list[Member]:
    """Return the members that the one of this rank should try to reach.

    Args:
        reached: incarnations that were reached before.
        choose: source of randomness for the sample.
    """
    others = [member for index, member in enumerate(members) if index != rank]
    if len(members) > _ALL:
        following = members[(rank + 1) % len(members)]
        others = [following, *choose.sample([member for member in others if member is not following], _SAMPLE)]
    return [member for member in others if member.incarnation not in reached]


class DataPort:
    """A listening port such as workers use, for probes only.

    Args:
        interface: address to listen on.
    """

    def __init__(self, context: Context, interface: str) -> None:
        # On any port, as workers listen, whatever ports are allowed.
        listener = Ports().listen(interface, 2048)
        self.number: int = listener.getsockname()[1]
        self._server = context.runtime.serve(listener, _reject, authenticator=context.authenticator)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class PeerProber:
    """This node's probes. :meth:`tick` is for one thread, and starts probes on another.

    Args:
        context: settings; ``queue`` wakes when an unreachable peer is reached again.
        reachability: receives the results.
        membership: this node's connection to rank 0's hub, which receives recoveries.
        machine: what this node knows of its round.
    """

    def __init__(self, context: Context, reachability: Reachability, membership: Membership, machine: Node) -> None:
        self.reachability = reachability
        self._context = context
        self._membership = membership
        self._machine = machine
        self._choose = random.Random(machine.me.node)
        self._reached: set[str] = set()
        self._next: Assignment | None = None
        self._next_at = 0.0
        self._retry_at: dict[tuple[str, Target], tuple[float, float]] = {}
        self._busy = False

    def begin(self, assignment: Assignment) -> None:
        """Plan the probes of a round whose rank 0 this node has reached."""
        first = assignment.round.members[0]
        # This node is connected to that hub; a port such as workers take is still to be tried.
        if not first.data_port:
            self._reached.add(first.incarnation)
        self._next, self._next_at = assignment, self._context.clock() + _DELAY_SECONDS

    def tick(self) -> None:
        """Start the probes that are due, unless others still run."""
        # Without a lock: this thread alone sets it, and where the probe's clears it late, the next one only begins
        # later.
        if self._busy:
            return
        now = self._context.clock()
        if self._next is not None and now >= self._next_at:
            assignment, self._next = self._next, None
            peers = peers_to_probe(assignment.round.members, assignment.rank, self._reached, self._choose)
            if peers:
                self._start(partial(self._probe_members, assignment.round, peers))
                return
        pairs = self.reachability.pairs()
        if not pairs:
            self._retry_at.clear()
            return
        due = []
        for key, pair in pairs.items():
            at, pause = self._retry_at.setdefault(key, (now + _RETRY_SECONDS[0], _RETRY_SECONDS[0]))
            if now >= at:
                pause = min(2 * pause, _RETRY_SECONDS[1])
                self._retry_at[key] = (now + pause, pause)
                due.append((key, (pair.peer_host, pair.port)))
        if due:
            self._start(partial(self._probe_again, due))

    def _start(self, probe: Callable[[], None]) -> None:
        self._busy = True

        def run() -> None:
            try:
                probe()
            finally:
                self._busy = False

        self._context.runtime.thread(run, "probing").start()

    def _probe_members(self, round_: Round, peers: list[Member]) -> None:
        """Probe members that were not reached before, twice."""
        left: list[tuple[Member, Target, int]] = [(peer, "peer_hub", peer.hub_port) for peer in peers]
        left += [(peer, "worker_port", peer.data_port) for peer in peers if peer.data_port]
        errors: dict[tuple[str, Target], OSError] = {}
        for _ in range(_TRIES):
            results = self._context.runtime.probe([(peer.host, port) for peer, _, port in left], _PROBE_SECONDS)
            failed = [(each, error) for each, error in zip(left, results, strict=True) if error is not None]
            errors = {(peer.incarnation, target): error for (peer, target, _), error in failed if is_unreachable(error)}
            left = [each for each, error in failed if is_unreachable(error)]
            if not left:
                break
        self._reached.update(peer.incarnation for peer in peers if not errors.keys() & _targets(peer))
        for peer in peers:
            for incarnation, target in _targets(peer) - errors.keys():
                self._recovered(incarnation, target)
        for peer, target, port in left:
            if target == "worker_port" and (peer.incarnation, "peer_hub") in errors:
                continue  # nothing of that machine can be reached
            # A probe takes seconds: the round may be over by now, and the peer's process with it.
            if self._both_are_in(round_, peer):
                purpose = _PURPOSES[target].format(round_.number)
                error = errors[peer.incarnation, target]
                self.reachability.failed(peer, purpose, error, _PROBE_SECONDS, target=target, port=port)

    def _both_are_in(self, round_: Round, peer: Member) -> bool:
        """Return whether this node and another one are still in a round."""
        seen = self._machine.seen
        is_in = self._machine.last_round == round_.number and self._membership.is_linked
        return is_in and not seen.over and peer.node not in seen.lost

    def _probe_again(self, due: list[tuple[tuple[str, Target], tuple[str, int]]]) -> None:
        errors = self._context.runtime.probe([address for _, address in due], _PROBE_SECONDS)
        for ((incarnation, target), _), error in zip(due, errors, strict=True):
            if error is None or not is_unreachable(error):
                self._recovered(incarnation, target)

    def _recovered(self, incarnation: str, target: Target) -> None:
        if self.reachability.reached(incarnation, target):
            self._membership.send_to_leader(Reached(incarnation))
            self._context.queue.wake()


def _targets(peer: Member) -> set[tuple[str, Target]]:
    return {(peer.incarnation, "peer_hub"), (peer.incarnation, "worker_port")}


def _reject(connection: Connection, _: object) -> None:
    connection.close("nothing is served here")


_PROBING_SECONDS = 5.0
"""Longest sleep while an unreachable node is to be probed again."""


@dataclass(frozen=True)
class Sleeper:
    """Sleep that other threads can end, and that starts the probes which are due.

    Args:
        context: clock and queue, which ends a sleep.
        prober: prober whose due probes are started before each sleep.
    """

    context: Context
    prober: PeerProber

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, at most for this time; return whether the node was woken.

        Raises:
            NodeLeaving: this node must leave.
        """
        self.prober.tick()
        longest = _PROBING_SECONDS if self.prober.reachability.pairs() else seconds
        woken = self.context.queue.wait(min(seconds, longest))
        if self.context.surroundings.must_leave():
            raise NodeLeaving("the node is leaving the run")
        return woken

    def sleep(self, seconds: float) -> None:
        """Sleep for this time, even if woken.

        Raises:
            NodeLeaving: this node must leave.
        """
        until = self.context.clock() + seconds
        while (left := until - self.context.clock()) > 0:
            self.wait(left)
