"""The state of a hub: which node seals, which members are lost, and for which spares a round makes room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc.agent_messages import Prepare, RanksConnecting
from azureml_elastic.node.core.hub_state import CloseLink, HubState, HubView, SealQueue, Send, SendAll
from azureml_elastic.node.core.messages import AllDone, Broadcast, Lost, RoundChanged, SealPosition, Watch
from azureml_elastic.node.core.pauses import SilenceLimit
from azureml_elastic.node.core.round import Limits, Member, Round
from azureml_elastic.node.core.watchers import Watcher, Watchers

TIMINGS = RendezvousTimings()


def candidate(node: str, number: int = 1, **fields) -> Member:
    return Member(node, f"i-{node}", round=number, host=node, hub_port=1, **fields)


class Hub:
    """A hub's state, whose connections are named by their nodes."""

    def __init__(self, round_: Round | None = None):
        self.now = 100.0
        self.state = HubState(Limits(1, 8), TIMINGS, self.now, SilenceLimit(TIMINGS))
        self._links = {}
        self._silent = {}
        if round_ is not None:
            self.state.enter(round_, self.now)

    def link(self, node: str) -> int:
        return self._links.setdefault(node, len(self._links))

    def watch(self, member: Member, **fields) -> list:
        """Have a candidate come; return the positions that are sent."""
        watch = Watch(member.round, is_open=True, candidacy=member, **fields)
        return self.positions(
            self.state.watching(self.link(member.node), member.node, member.incarnation, watch, self.now)
        )

    def hello(self, node: str, number: int = 1, incarnation: str | None = None) -> list:
        return self.state.greeted(self.link(node), node, incarnation or f"i-{node}", number, self.now)

    def close(self, node: str) -> list | None:
        return self.state.closed(self.link(node), self.now)

    def tick(self, silent: str = "", seconds: float = 0.5, ticks: int = 1) -> list:
        """Let time pass in which some nodes are silent, or stay so."""
        found = []
        self._silent = last = {node: self._silent.get(node, self.now) for node in silent}
        for _ in range(ticks):
            self.now += seconds
            last_received = {link: last.get(node, self.now) for node, link in self._links.items()}
            found += self.state.ticked(self.now, last_received) or []
        return found

    def positions(self, actions: list) -> list:
        names = {link: node for node, link in self._links.items()}
        return [
            (names[action.link], action.message.position)
            for action in actions
            if isinstance(action, Send)
            and isinstance(action.message, SealPosition)
            and action.message.position is not None
        ]


# --- seal queue ------------------------------------------------------------------------------------------------------


def test_the_queue_is_the_first_two_and_the_first_two_without_strikes():
    queue = SealQueue(Round(2, previous=("p",)))
    queue.add([candidate(node, 2) for node in "dcb"] + [candidate("a", 1)])
    assert [member.node for member in queue.first] == ["b", "c"]
    queue.add([candidate("p", 2, strikes=1), candidate("0", 2, strikes=3)])
    assert [member.node for member in queue.first] == ["p", "0", "b", "c"]
    assert not queue.remove("d")
    assert queue.remove("b")


def test_the_first_position_is_sent_each_time_and_the_second_once():
    hub = Hub()
    assert hub.state.add_own(Round(), candidate("m")) == []  # its own node is sent nothing, but calls should_seal()
    assert hub.state.should_seal()
    assert hub.watch(candidate("z")) == [("z", 1)]
    assert hub.watch(candidate("b")) == [("b", 0)]
    assert hub.watch(candidate("y")) == [("b", 0)]
    assert hub.watch(candidate("a")) == [("a", 0), ("b", 1)]
    assert not hub.state.should_seal()
    assert hub.positions(hub.close("a")) == [("b", 0)]
    assert hub.state.should_seal()
    assert hub.positions(hub.close("b")) == [("y", 1)]
    assert hub.close("z") is None


def test_a_node_that_still_imports_lets_others_meet_at_its_hub():
    hub = Hub()
    assert hub.watch(candidate("c")) == [("c", 0)]
    assert hub.watch(candidate("b")) == [("b", 0), ("c", 1)]


def test_a_hub_follows_the_row_and_finds_nodes_that_have_missed_a_version():
    hub = Hub()
    assert hub.state.newer_than(Round()) is None
    sealed, reopened = Round(1, "sealed"), Round(2, previous=("z",))
    assert hub.state.publish(sealed) == [SendAll(RoundChanged(sealed))]
    assert hub.state.publish(Round()) == []
    assert hub.state.newer_than(Round()) == sealed
    # A candidate may know the next round before this hub does.
    assert hub.watch(candidate("a", 2)) == [("a", 0)]
    assert hub.watch(candidate("z", 2)) == [("a", 0), ("z", 1)]
    assert hub.state.publish(reopened)
    assert hub.positions(hub.state.take_positions()) == [("z", 0), ("a", 1)]
    assert not hub.state.is_first_sign_of(sealed)
    assert hub.state.is_first_sign_of(replace(reopened, state="sealed"))
    assert not hub.state.is_first_sign_of(replace(reopened, state="sealed"))


def test_a_candidate_has_the_name_that_it_has_proved():
    hub = Hub()
    watch = Watch(1, is_open=True, candidacy=candidate("a"))
    (action,) = hub.state.watching(0, "b", "i-b", watch, hub.now)
    assert isinstance(action, CloseLink)
    assert hub.state.watchers.candidates() == []


# --- members ---------------------------------------------------------------------------------------------------------

SEALED = Round(1, "sealed", members=tuple(candidate(node) for node in "abc"))


@pytest.fixture
def hub():
    """The hub of a round with three members, all of which have come."""
    hub = Hub(SEALED)
    for node in "abc":
        assert hub.hello(node) == []
    return hub


def test_a_member_whose_connection_ends_is_lost_at_once_and_the_others_learn_it(hub):
    assert hub.close("b") == [Send(hub.link(node), Lost(("b",))) for node in "ac"]
    assert hub.state.view(hub.now).lost == {"b"}
    assert not hub.state.view(hub.now).absent


def test_a_member_that_comes_late_gets_what_was_sent_to_the_others_before():
    """All others stop at a proposed step until it has voted."""
    hub = Hub(SEALED)
    proposal, later = Broadcast(Prepare(1, 5, "rejoin")), Broadcast(RanksConnecting())
    hub.hello("a")
    assert hub.state.to_members(proposal) == [Send(hub.link("a"), proposal)]
    assert hub.hello("b") == [Send(hub.link("b"), proposal)]
    hub.state.to_members(later)
    assert hub.hello("c") == [Send(hub.link("c"), proposal), Send(hub.link("c"), later)]
    hub.state.to_members(later)
    hub.state.enter(replace(SEALED, number=2), hub.now)
    assert hub.hello("a", 2) == [], "what was sent in another round is over"


@pytest.mark.parametrize(("beats", "seconds"), [(1, 3.0), (13, 1.0)])
def test_a_silent_member_is_lost_and_its_connection_closed_sooner_if_its_beats_are_known(hub, beats, seconds):
    assert hub.tick(seconds=0.25, ticks=beats) == []
    assert hub.tick(silent="b", seconds=0.25, ticks=round(seconds / 0.25)) == []
    found = hub.tick(silent="b", seconds=0.25)
    assert Send(hub.link("a"), Lost(("b",))) in found
    assert CloseLink(hub.link("b"), "silent") in found
    assert hub.state.view(hub.now).lost == {"b"}


@pytest.mark.parametrize("returns", [Hub.hello, lambda hub, node: hub.watch(candidate(node, 2))])
def test_a_member_that_was_given_up_for_a_pause_and_returns_teaches_how_long_pauses_are(hub, returns):
    hub.tick(seconds=0.25, ticks=13)
    assert hub.tick(silent="b", seconds=0.25, ticks=6)
    hub.close("b")
    returns(hub, "b")
    hub.state.enter(replace(SEALED, number=2), hub.now)
    for node in "abc":
        hub.hello(node, 2)
    hub.tick(seconds=0.25, ticks=13)
    assert hub.tick(silent="c", seconds=0.25, ticks=11) == []
    assert hub.tick(silent="c", seconds=0.25, ticks=2)


def test_a_member_that_ends_its_connection_after_a_pause_of_this_process_is_not_lost(hub):
    hub.now += 2.5
    assert hub.close("b") == []
    assert hub.state.view(hub.now) == HubView(was_given_up=True)
    assert hub.tick(ticks=20) == [], "nor is it absent, although all had to be here long ago"
    assert hub.state.view(hub.now) == HubView(was_given_up=True)
    assert hub.state.enter(replace(SEALED, number=2), hub.now)
    assert not hub.state.view(hub.now).was_given_up


@pytest.mark.parametrize(("waiting", "absent"), [(None, {"c"}), ("i-c", set()), ("another", {"c"})])
def test_a_member_that_does_not_come_is_absent_unless_it_is_seen_to_wait(waiting, absent):
    """A process that has returned under its name is not the one that was sealed in."""
    hub = Hub(SEALED)
    for node in "ab":
        hub.hello(node)
    if waiting is not None:
        hub.state.watching(hub.link("c"), "c", waiting, Watch(1), hub.now)
    assert hub.tick(ticks=10) == []
    found = hub.tick(ticks=2)
    assert hub.state.view(hub.now).absent == absent
    assert (Send(hub.link("a"), Lost(("c",), ("c",))) in found) == bool(absent)
    assert set(hub.state.view(hub.now).waiting) == ({"c"} if waiting == "another" else set())


def test_all_learn_once_the_workers_of_all_have_succeeded_and_who_has_may_go(hub):
    assert hub.state.done(hub.link("a")) == []
    assert hub.state.done(hub.link("b")) == []
    assert hub.close("b") == []
    assert hub.state.done(hub.link("c")) == [Send(hub.link(node), AllDone()) for node in "ac"]
    assert not hub.state.view(hub.now).lost


def test_members_of_a_later_round_are_kept_when_this_hub_enters_it_and_those_of_another_process_are_refused(hub):
    assert hub.hello("a", 2) == [SendAll(RoundChanged(None))]
    assert hub.state.take_read_request()
    assert not hub.state.take_read_request()
    hub.hello("b", 2, "another")
    sealed = replace(SEALED, number=2)
    assert hub.state.enter(sealed, hub.now) == [SendAll(RoundChanged(sealed))]
    assert hub.state.to_members(AllDone()) == [Send(hub.link("a"), AllDone())]
    (refused,) = hub.hello("c", 2, "another")
    assert refused.link == hub.link("c")
    assert isinstance(refused, CloseLink)


def test_a_member_of_a_round_that_is_over_is_sent_the_newer_one(hub):
    reopened = Round(2, previous=("a",))
    hub.state.publish(reopened)
    assert hub.hello("b") == [Send(hub.link("b"), RoundChanged(reopened))]


def test_a_silent_waiting_node_is_dropped(hub):
    hub.state.watching(hub.link("x"), "x", "i-x", Watch(1), hub.now)
    assert hub.tick(silent="x", ticks=18) == []
    assert hub.tick(silent="x") == [CloseLink(hub.link("x"), "silent")]


# --- spares ----------------------------------------------------------------------------------------------------------


class Spares:
    """Watchers of rank 0's hub over several rounds."""

    def __init__(self):
        self.now = 100.0
        self.watchers = Watchers()

    def says(self, node: str, beside: int) -> None:
        self.watchers.add(node, Watcher(0, self.now, beside=beside))

    def seal(self, number: int, members: str, expected: str) -> None:
        self.watchers.enter(
            Round(number, "sealed", tuple(candidate(m, number) for m in members), expected=(*expected,))
        )

    def waiting(self, members: str = "") -> str:
        return "".join(sorted(self.watchers.waiting(members, self.now)))


def test_room_is_made_for_nodes_that_wait_beside_the_round():
    spares = Spares()
    spares.seal(1, "a", "")
    spares.says("x", 1)
    spares.says("a", 1)
    assert spares.waiting("a") == "x"


def test_no_room_is_made_for_a_quarantined_host():
    watchers = Watchers()
    watchers.enter(Round(1, "sealed", (candidate("a"),)))
    for node, strikes in (("x", 1), ("y", 2)):
        watchers.add(node, Watcher(0, 0.0, beside=1, strikes=strikes))
    assert list(watchers.waiting("a", 0.0, 2)) == ["x"]
    assert list(watchers.waiting("a", 0.0)) == ["x", "y"]


def test_a_node_that_missed_the_seal_counts_again_once_it_waits_beside_that_round():
    spares = Spares()
    spares.seal(1, "a", "")
    spares.says("x", 1)
    spares.seal(2, "a", "ax")
    spares.now += 1000
    assert spares.waiting("a") == ""  # a connection may be all that is left of it
    spares.says("x", 2)
    assert spares.waiting("a") == "x"


def test_a_node_that_never_joins_waits_longer_each_time_until_it_has_joined():
    spares = Spares()
    spares.seal(1, "a", "")
    waits = []
    for number in range(2, 10):
        spares.seal(number, "a", "ax")
        spares.says("x", number)
        said = spares.now
        while not spares.waiting("a"):
            spares.now += 1
            spares.says("x", number)  # saying it again does not begin the wait anew
        waits.append(spares.now - said)
    assert waits == [0, 15, 30, 60, 120, 240, 240, 240]
    spares.seal(10, "ax", "ax")
    spares.seal(11, "a", "a")
    spares.says("x", 11)
    assert spares.waiting("a") == "x"
