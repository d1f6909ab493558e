"""What the hub of a node knows and decides: who is connected, who of its round is lost, and which node should seal.

Every node has one from its start, since nodes that wait meet at one of them. Connections are numbers, time is an
argument, and what is to be done is returned. A member knows of its round what rank 0's hub has sent to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.events import HubSent, LinkEnded, RoundSeen
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector, SilenceLimit
from azureml_elastic.node.core.round import Limits, Member, Round, room_for
from azureml_elastic.node.core.sealing import candidates
from azureml_elastic.node.core.watchers import Watcher, Watchers

_WATCHER_TIMEOUT_FACTOR = 3
"""Heartbeat timeouts after which a silent waiting node is dropped: nothing depends on its answers."""

_AHEAD = 2
"""Number of candidates that look after the round: the one that should seal it, and the one that takes over."""


_MAX_DEBOUNCES = 4
"""Largest number of debounces for which a spare waits while further ones come."""


@dataclass(frozen=True)
class HubView:
    """State of a hub's round.

    Args:
        absent: lost members that have never connected.
        waiting_since: spares that can be expected to join, with the monotonic seconds at which they began to wait.
        was_given_up: whether members have ended their connections because this process itself did not run.
    """

    lost: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    waiting_since: Mapping[str, float] = field(default_factory=dict)
    was_given_up: bool = False

    @property
    def waiting(self) -> frozenset[str]:
        """Names of these spares."""
        return frozenset(self.waiting_since)

    def spares(self, now: float, debounce: float) -> frozenset[str]:
        """Return the spares to make room for, once none has come for the debounce, or the first has waited for four."""
        waits = [now - since for since in self.waiting_since.values()]
        due = waits and (min(waits) >= debounce or max(waits) >= _MAX_DEBOUNCES * debounce)
        return self.waiting if due else frozenset()


@dataclass(frozen=True)
class Send:
    """A message is to be sent on the connection of this number."""

    link: int
    message: messages.Message


@dataclass(frozen=True)
class SendAll:
    """A message is to be sent on all connections."""

    message: messages.Message


@dataclass(frozen=True)
class CloseLink:
    """The connection of this number is to be closed."""

    link: int
    reason: str


HubAction = Send | SendAll | CloseLink


@dataclass
class _Peer:
    """The process at the other end of a connection.

    Args:
        round: number of the round of which it has said to be a member, 0 for none.
        waits: whether it has said since that it waits.
        position: position among the candidates that it was sent last.
    """

    node: str
    incarnation: str
    round: int = 0
    waits: bool = False
    position: int | None = None


class SealQueue:
    """The first few candidates of an open round.

    Rows of the table decide which node seals. A hub only selects the nodes that read them, so that not all do: the
    first two in the order of ranks and, because strikes and unreachable pairs may exclude these, the first two without.
    """

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.first: list[Member] = []

    def add(self, members: Iterable[Member]) -> None:
        """Add candidates; those of other rounds are ignored."""
        ranked = candidates(self.round, {member.node: member for member in (*self.first, *members)}.values())
        flawless = [member for member in ranked if not member.strikes and not member.unreached]
        ahead = {member.node for member in (*ranked[:_AHEAD], *flawless[:_AHEAD])}
        self.first = [member for member in ranked if member.node in ahead]

    def remove(self, node: str) -> bool:
        """Remove a candidate; return whether it was one of the first, so that the others must be added again."""
        kept = [member for member in self.first if member.node != node]
        was_first = len(kept) < len(self.first)
        self.first = kept
        return was_first


class HubState:
    """The state of one hub. Not thread-safe.

    Args:
        silence: limit of the members' silence.
    """

    def __init__(self, limits: Limits, timings: RendezvousTimings, now: float, silence: SilenceLimit) -> None:
        self._limits = limits
        self._silence = silence
        self._beats: dict[int, BeatWatch] = {}
        self._join_timeout = timings.join_timeout.total_seconds()
        self._pauses = PauseDetector(now, silence.tick)
        self.watchers = Watchers()
        self._peers: dict[int, _Peer] = {}
        self._published: Round | None = None
        self._own: Member | None = None
        self._queue: SealQueue | None = SealQueue(Round())  # nodes meet at this hub while its own node still imports
        self._requested = 0
        self._must_read = False
        self._round: Round | None = None
        self._entered = 0.0
        self._members: dict[str, int] = {}
        self._lost: set[str] = set()
        self._absent: set[str] = set()
        self._done: set[str] = set()
        self._was_given_up = False
        self._early: list[messages.Message] = []

    # --- the round of which this node is rank 0 ----------------------------------------------------------------------

    def enter(self, round_: Round, now: float) -> list[HubAction]:
        """Serve a sealed round in which this node is rank 0, instead of the one before."""
        self._round = round_
        self._entered = now
        self._lost, self._absent, self._done, self._was_given_up = set(), set(), set(), False
        self._early = []
        unreachable = self.watchers.enter(round_)
        # Members may have connected before this hub's own node knew of the round. Those of the round before, and former
        # processes of a node, are not its members.
        self._members = {
            name: link
            for name, link in self._members.items()
            if self._peers[link].round == round_.number and self._is_member(link)
        }
        answers = [Send(link, messages.SealPosition(unreachable_from=names)) for link, names in unreachable]
        return [*self.publish(round_), *answers]

    def view(self, now: float) -> HubView:
        """Return the state of the round."""
        # Members that waited here while the round was open may not have sent their greeting yet.
        present = (self._members.keys() | self._names()) - self._lost
        waiting_since = self.watchers.waiting(present, now, self._limits.quarantine)
        return HubView(frozenset(self._lost), frozenset(self._absent), waiting_since, self._was_given_up)

    def member_of(self, link: int) -> tuple[str, int] | None:
        """Return the name of the member at this connection and the number of its round, ``None`` for other nodes."""
        peer = self._peers.get(link)
        return (peer.node, peer.round) if peer is not None and not peer.waits else None

    def to_members(self, message: messages.Message) -> list[HubAction]:
        """Return what sends a message to the members of the round; those that come later get it when they come."""
        number = self._round.number if self._round else 0
        if not self._names() <= self._members.keys():
            self._early.append(message)
        return [Send(link, message) for link in self._members.values() if self._peers[link].round == number]

    def done(self, link: int) -> list[HubAction]:
        """The workers of a member have succeeded."""
        member = self.member_of(link)
        if member is None or self._round is None or member[1] != self._round.number:
            return []  # a message of an older round
        self._done.add(member[0])
        return self.to_members(messages.AllDone()) if self._names() <= self._done else []

    # --- connections -------------------------------------------------------------------------------------------------

    def greeted(self, link: int, node: str, incarnation: str, number: int, now: float) -> list[HubAction]:
        """A node says that it is a member of a round."""
        peer = _Peer(node, incarnation, number)
        self._silence.returned(incarnation, now)
        round_ = self._round
        if round_ is not None and number == round_.number and round_.rank_of(node, incarnation) is None:
            return [CloseLink(link, f"{node} is not a member of round {number} in this incarnation")]
        self._peers[link] = peer
        # The sealed round may reach a member before it reaches this node. A greeting of an older one is only late.
        if round_ is None or number >= round_.number:
            self._members[node] = link
            self.watchers.remove(node)
        seen = Round(number, "sealed")
        missed, unknown = self.newer_than(seen), self.is_first_sign_of(seen)
        self._must_read = self._must_read or unknown
        actions: list[HubAction] = []
        if missed is not None:
            actions.append(Send(link, messages.RoundChanged(missed)))
        if round_ is not None and number == round_.number:
            # A proposal that a member never gets stops all others at its step: they wait for this member's vote.
            actions += [Send(link, message) for message in self._early]
            if self._names() <= self._members.keys():
                self._early = []
        if unknown:  # the node that has sealed the round has not sent it here, or its message was lost
            actions.append(SendAll(messages.RoundChanged(None)))
        return actions

    def watching(self, link: int, node: str, incarnation: str, watch: messages.Watch, now: float) -> list[HubAction]:
        """A node says for what it waits."""
        candidacy = watch.candidacy
        if candidacy is not None and (candidacy.node, candidacy.incarnation) != (node, incarnation):
            return [CloseLink(link, f"{node} wants to be a candidate in the name of {candidacy.node}")]
        self._silence.returned(incarnation, now)
        before = self._peers.get(link)
        self._peers[link] = _Peer(node, incarnation, before.round if before is not None else 0, waits=True)
        watcher = Watcher(
            link,
            now,
            beside=0 if watch.is_open else watch.round,
            candidacy=candidacy,
            strikes=watch.strikes,
            incarnation=incarnation,
            unreached=frozenset(watch.unreached),
        )
        self._watch(watcher, node)
        missed = self.newer_than(Round(watch.round, "open" if watch.is_open else "sealed"))
        # Sent even if empty: any answer shows the node that this hub serves it.
        answer = Send(link, messages.SealPosition(unreachable_from=self.watchers.unreached_by(watcher)))
        changed = [] if missed is None else [Send(link, messages.RoundChanged(missed))]
        return [*changed, answer, *self.take_positions()]

    def closed(self, link: int, now: float) -> list[HubAction] | None:
        """A connection has ended.

        Returns:
            What to do, ``None`` if it changes nothing for anybody.
        """
        self._beats.pop(link, None)
        peer = self._peers.pop(link, None)
        if peer is None:
            return None
        actions = self.take_positions() if (was_first := self._leave(peer.node, link)) else []
        # A node that has connected anew since is not lost with its old connection.
        if self._members.get(peer.node) == link:
            del self._members[peer.node]
            if self._round is not None and peer.round == self._round.number:
                # Members that have given this process up live, and form the next round without its node.
                if peer.node not in self._done and self._pauses.was_given_up(self._silence.smallest(now), now):
                    self._was_given_up = True
                    return actions
                return [*actions, *self._lose([peer.node])]
        return actions if was_first else None

    def ticked(self, now: float, last_received: Mapping[int, float]) -> list[HubAction] | None:
        """Look for silent nodes.

        Args:
            last_received: moment of the last message, by connection.

        Returns:
            What to do, ``None`` if nothing has changed.
        """
        self._pauses.tick(now)

        longest = _WATCHER_TIMEOUT_FACTOR * self._silence.timeout
        actions: list[HubAction] = [
            CloseLink(watcher.link, "silent")
            for watcher in self.watchers.nodes.values()
            if watcher.link in last_received and self._pauses.silence(last_received[watcher.link], now) > longest
        ]
        if self._round is not None:
            silent = {
                name: link
                for name, link in self._members.items()
                if link in last_received and self._is_lost(link, last_received[link], now)
            }
            for link in silent.values():
                # If it returns, its silence was a pause, and the limit for all gets longer.
                self._silence.gave_up(self._peers[link].incarnation, last_received[link])
            # A member that still waits here is alive, but has not received the seal yet. A node that has died may have
            # returned under its name, which is no sign of the process that was sealed in.
            here = self._members.keys() | self.watchers.waiting_members()
            is_late = self._pauses.silence(self._entered, now) > self._join_timeout
            absent = sorted(self._names() - here) if is_late else []
            known = len(self._lost)
            actions += self._lose([*silent, *absent], absent)
            actions += [CloseLink(link, "silent") for link in silent.values()]
            if len(self._lost) > known:
                return actions
        return actions or None

    def _is_lost(self, link: int, last_received: float, now: float) -> bool:
        """Return whether a member counts as lost because it is silent."""
        beats = self._beats.get(link)
        if beats is None:
            beats = self._beats[link] = BeatWatch(self._silence, self._pauses, last_received)
        return beats.is_lost(last_received, now)

    # --- the round's row ---------------------------------------------------------------------------------------------

    def publish(self, round_: Round) -> list[HubAction]:
        """Record a version of the row; return what sends it to all nodes if it is newer than the one before."""
        if not round_.is_newer_than(self._published):
            return []
        self._published = round_
        self._queue = SealQueue(round_) if round_.state == "open" else None
        self._requeue()
        return [SendAll(messages.RoundChanged(round_))]

    def newer_than(self, seen: Round) -> Round | None:
        """Return the newest version of the row if a node that has seen this one has missed it."""
        published = self._published
        return published if published is not None and published.is_newer_than(seen) else None

    def is_first_sign_of(self, sealed: Round) -> bool:
        """Return, once for each round, whether a member is in a sealed round that this hub does not know of."""
        unknown = sealed.is_newer_than(self._published) and sealed.number > self._requested
        self._requested = max(sealed.number, self._requested)
        return unknown

    def request_read(self) -> None:
        """This hub's own node must read the row."""
        self._must_read = True

    def take_read_request(self) -> bool:
        """Return, once, whether this hub has received that there is a newer round, which its own node must read."""
        request, self._must_read = self._must_read, False
        return request

    # --- candidates of an open round ---------------------------------------------------------------------------------

    def add_own(self, round_: Round, me: Member) -> list[HubAction]:
        """Add the hub's own node as a candidate of an open round."""
        self._own = me
        self.publish(round_)  # sent by the node that has written it
        if self._queue is not None:
            self._queue.add([me])
        return self.take_positions()

    def _watch(self, watcher: Watcher, node: str) -> None:
        """Add a waiting node, or its new state."""
        self.watchers.add(node, watcher)
        candidate = watcher.candidacy
        if candidate is None:
            return
        number = self._queue.round.number if self._queue is not None else 0
        if candidate.round > number and Round(candidate.round).is_newer_than(self._published):
            # The hub's own node does not have that round yet, nor its survivors: the order is by name until then.
            self._queue = SealQueue(Round(candidate.round))
        if self._queue is not None:
            self._queue.add([candidate])

    def _leave(self, node: str, link: int) -> bool:
        """Remove a waiting node whose connection has ended; return whether the queue has changed."""
        if not self.watchers.remove(node, link) or self._queue is None or not self._queue.remove(node):
            return False
        self._requeue()
        return True

    def should_seal(self) -> bool:
        """Return whether the hub's own node is among the first in the queue."""
        own = self._own.node if self._own is not None else None
        return self._queue is not None and any(member.node == own for member in self._queue.first)

    def take_positions(self) -> list[HubAction]:
        """Return what sends positions: always the first one, others where they are new."""
        actions: list[HubAction] = []
        for position, member in enumerate(self._queue.first if self._queue is not None else ()):
            watcher = self.watchers.nodes.get(member.node)
            peer = self._peers.get(watcher.link) if watcher is not None else None
            # The first one gets its position at each change, although it has it: each time it reads the rows again
            # soon, and the change may be what its decision waits for.
            if watcher is not None and peer is not None and (position == 0 or peer.position != position):
                peer.position = position
                actions.append(Send(watcher.link, messages.SealPosition(position)))
        return actions

    def _requeue(self) -> None:
        if self._queue is not None:
            self._queue.add([*self.watchers.candidates(), *([self._own] if self._own else [])])

    # -----------------------------------------------------------------------------------------------------------------

    def _lose(self, nodes: Iterable[str], absent: Collection[str] = ()) -> list[HubAction]:
        """Record losses, of members that have never connected in particular; return what sends them to the others."""
        if self._was_given_up:
            return []  # who has ended its connection lives, and is not absent: this node is the one that is lost
        lost = tuple(node for node in nodes if node not in self._lost | self._done)
        never_connected = tuple(node for node in lost if node in absent)
        self._lost.update(lost)
        self._absent.update(never_connected)
        return self.to_members(messages.Lost(lost, never_connected)) if lost else []

    def _names(self) -> set[str]:
        return {member.node for member in self._round.members} if self._round else set()

    def _is_member(self, link: int) -> bool:
        peer = self._peers[link]
        return self._round is not None and self._round.rank_of(peer.node, peer.incarnation) is not None


@dataclass
class HubReports:
    """What a member knows of its round from its connection to rank 0's hub.

    Attributes:
        absent: lost members that have never connected to the hub.
        all_done: whether the workers of all members have succeeded.
        must_read: whether the round has changed, and the hub did not send to what.
        was_given_up: whether the connection has ended because the hub has given this process up, which did not run.
    """

    lost: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    all_done: bool = False
    must_read: bool = False
    broken: bool = False
    was_given_up: bool = False

    def take(self, event: HubSent | LinkEnded) -> None:
        """Record what the hub has sent, or that the connection has ended."""
        match event:
            case LinkEnded():
                self.broken, self.was_given_up = True, event.was_given_up
            case HubSent(message=messages.Lost() as message):
                self.lost |= {*message.nodes}
                self.absent |= {*message.absent}
            case HubSent(message=messages.AllDone()):
                self.all_done = True
            case HubSent(message=messages.RoundChanged(round=None)):
                self.must_read = True

    def see(
        self,
        round_: Round,
        node: str,
        view: HubView,
        *,
        over: bool,
        limits: Limits,
        debounce: float,
        now: float,
    ) -> RoundSeen:
        """Return what is known of a round.

        Args:
            view: what its own hub knows, where it is rank 0.
            over: whether the round has ended in the table.
            debounce: seconds in which no further spare may come before room is made.
        """
        lost = self.lost | view.lost
        was_given_up = view.was_given_up or self.was_given_up
        # The hub is that of rank 0: its node is gone, unless the one that was away is this one.
        if self.broken and not was_given_up:
            lost |= {round_.members[0].node} - {node}
        spares = view.spares(now, debounce)
        has_room = room_for(spares, len(round_.members), limits.maximum, limits.nodes_per_replica)
        return RoundSeen(
            lost=lost - {node},
            over=over or was_given_up or self.broken or node in lost,
            waiting=spares if has_room else frozenset(),
            all_done=self.all_done,
            was_given_up=was_given_up,
        )

    def take_read_request(self) -> bool:
        """Return, once, whether the row must be read."""
        request, self.must_read = self.must_read, False
        return request
