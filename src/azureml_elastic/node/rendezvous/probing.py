"""Probes: on its way into a round each node connects once to what its workers will connect to, before they start.

Agents need to reach rank 0's node only, but workers connect to the round's store and to all other workers, and hang
without an error where two nodes cannot reach each other. So each node connects to the store and to all members that it
has not reached before, in a large round to the next one in the order of ranks and to some others at random. With a port
range, hubs do not show whether the ports of workers can be reached, since NCCL and gloo use any free port: each node
then also listens on such a port. A peer that cannot be reached is probed again, on a thread, until it can be.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence

from azureml_elastic.ipc import Connection
from azureml_elastic.node.core.messages import Reached
from azureml_elastic.node.core.node import Node
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.host.addresses import Ports, format_address
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.link import Membership
from azureml_elastic.node.rendezvous.reachability import Reachability, Target, UnreachablePair, is_unreachable

_PROBE_SECONDS = 3.0
"""Long enough for TCP's second attempt, which follows the first after a second."""

_REFUSED_SECONDS = 2.0
"""Time for which a refused connection is tried again: the hub may report meanwhile that the node is lost, which names
the cause."""

_POLL_SECONDS = 0.05

_RETRY_SECONDS = (5.0, 60.0)
"""First and longest pause between two attempts at unreachable peers."""

_ALL = 32
"""Largest round in which every member probes every other one."""

_SAMPLE = 8


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


def _reject(connection: Connection, _: object) -> None:
    connection.close("nothing is served here")


class PeerProber:
    """This node's probes. For the agent's thread, except for methods marked thread-safe.

    Args:
        context: settings; ``queue`` wakes when an unreachable peer is reached again.
        reachability: receives the results.
        membership: this node's connection to rank 0's hub, which receives recoveries.
        machine: what this node knows of its round.
    """

    def __init__(self, context: Context, reachability: Reachability, membership: Membership, machine: Node) -> None:
        self._context = context
        self._reachability = reachability
        self._membership = membership
        self._machine = machine
        self._choose = random.Random(machine.me.node)
        self._reached: set[str] = set()
        self._lock = threading.Lock()
        self._watches = False
        self._closed = context.runtime.event()

    def forget(self) -> None:
        """Have all members probed again: what has ended the last round may be between them."""
        self._reached.clear()

    def reach(self, round_: Round, rank: int, is_broken: Callable[[], bool]) -> list[str] | None:
        """Connect to what this node's workers will connect to; return what they cannot reach.

        Args:
            is_broken: function that returns whether the round has broken, which ends the attempt.

        Returns:
            A text for each; ``None`` where the round has broken before it was known.
        """
        first = round_.members[0]
        targets: list[tuple[Member, Target, int]] = [(first, "store", first.store_port)] if rank else []
        if rank and not first.data_port:
            self._reached.add(first.incarnation)  # this node is connected to its hub
        peers = peers_to_probe(round_.members, rank, self._reached, self._choose)
        targets += [(peer, "member", peer.data_port or peer.hub_port) for peer in peers]
        if not targets:
            return []
        found: list[list[str]] = []
        done = self._context.runtime.event()

        def probe() -> None:
            # To its end, even if the round is over: another member may have been quicker to find its pair, and the next
            # round is to be without this one, too.
            found.append(self._probe(round_, targets))
            done.set()

        self._context.runtime.thread(probe, "probing").start()
        while not done.wait(_POLL_SECONDS) and not is_broken():
            pass
        return found[0] if found else None

    def _probe(self, round_: Round, targets: Sequence[tuple[Member, Target, int]]) -> list[str]:
        runtime, texts = self._context.runtime, list[str]()
        until = runtime.clock() + _REFUSED_SECONDS
        left, failed = targets, list[tuple[tuple[Member, Target, int], OSError]]()
        while left:
            errors = runtime.probe([(peer.host, port) for peer, _, port in left], _PROBE_SECONDS)
            for (peer, target, _), error in zip(left, errors, strict=True):
                if error is None:
                    self._recovered(peer.incarnation, target)
                    self._reached.add(peer.incarnation)
            failed = [(each, error) for each, error in zip(left, errors, strict=True) if error is not None]
            left = [each for each, _ in failed] if runtime.clock() < until else []
            if left:
                runtime.event().wait(_POLL_SECONDS)
        for (peer, target, port), error in failed:
            if is_unreachable(error) and peer.node not in self._machine.seen.lost:
                self._reached.discard(peer.incarnation)
                texts.append(str(self._failed(round_, peer, target, port, error)))
            elif target == "store":
                where = format_address(peer.host, port)
                texts.append(f"{self._machine.me.node} cannot reach the store of {peer.node} at {where}: {error}")
        return texts

    def _failed(self, round_: Round, peer: Member, target: Target, port: int, error: OSError) -> UnreachablePair:
        purpose = f"the store of round {round_.number}"
        if target == "member":
            which = "on a port such as its workers take" if peer.data_port else "to which the workers here connect"
            purpose = f"a member of round {round_.number}, {which}"
        return self._reachability.failed(peer, purpose, error, _PROBE_SECONDS, target=target, port=port)

    def watch(self) -> None:
        """Probe the peers that cannot be reached, on a thread, until all can be. Thread-safe."""
        with self._lock:
            watches, self._watches = self._watches, True
        if not watches:
            self._context.runtime.thread(self._watch, "watch for unreachable peers").start()

    def close(self) -> None:
        """End these probes."""
        self._closed.set()

    def _watch(self) -> None:
        pause, longest = _RETRY_SECONDS
        while not self._closed.wait(pause):
            pause = min(2 * pause, longest)
            pairs = self._reachability.pairs()
            errors = self._context.runtime.probe(
                [(pair.peer_host, pair.port) for pair in pairs.values()], _PROBE_SECONDS
            )
            for (incarnation, target), error in zip(pairs, errors, strict=True):
                if error is None or not is_unreachable(error):
                    self._recovered(incarnation, target)
            with self._lock:
                self._watches = bool(self._reachability.pairs())
                if not self._watches:
                    return

    def _recovered(self, incarnation: str, target: Target) -> None:
        if self._reachability.reached(incarnation, target):
            self._membership.send_to_leader(Reached(incarnation))
            self._context.queue.wake()
