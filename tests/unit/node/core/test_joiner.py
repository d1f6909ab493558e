"""A node on its way into a round: events in, actions out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.joiner import Joiner, JoinState
from azureml_elastic.node.core.joining import greeting_of
from azureml_elastic.node.core.messages import RoundChanged, SealPosition
from azureml_elastic.node.core.round import Limits, Member, Round

TIMINGS = RendezvousTimings()
STALE_SECONDS = 2 * TIMINGS.table_heartbeat_interval.total_seconds()
SETTLE_SECONDS = TIMINGS.settle_timeout.total_seconds()


def member(node: str, number: int = 1, **fields) -> Member:
    return Member(node, f"i-{node}", round=number, host=node, hub_port=1, **fields)


def sealed(*nodes: str, number: int = 1) -> Round:
    return Round(number, "sealed", members=tuple(member(node, number) for node in nodes))


class Node:
    """A joiner with its clock, which keeps what it has returned."""

    def __init__(self, name: str = "me", *, minimum: int = 1, maximum: int = 4, **fields) -> None:
        self.row = member(name)
        self.now = 100.0
        self.joiner = Joiner(replace(self.row, round=0), Limits(minimum, maximum), TIMINGS, **fields)
        self.actions: list[do.JoinAction] = []

    def feed(self, *events: ev.JoinEvent) -> do.JoinAction | None:
        """Bring events; return the last action of the last one."""
        for event in events:
            self.actions = self.joiner.handle(event, self.now)
            calls = [action for action in self.actions if isinstance(action, do.Call)]
            assert len(calls) <= 1, "more than one call"
            assert not calls or calls[-1] is self.actions[-1], "something is to be done after a call"
        return self.actions[-1] if self.actions else None

    def until_deadline(self) -> do.JoinAction | None:
        self.now = self.joiner.deadline
        return self.feed(ev.TimerFired())

    def candidate(self, round_: Round | None = None, **known: Member) -> do.JoinAction | None:
        """Become a candidate of an open round."""
        round_ = round_ or Round()
        assert self.feed(ev.Started(round_, known)) == do.PrepareRow(round_)
        self.row = replace(self.row, round=round_.number)
        action = self.feed(ev.RowPrepared(self.row))
        if round_.number == 1:
            assert action == do.WriteRow(self.row, round_)
            action = self.feed(ev.RowWritten())
        assert do.Offer(round_, self.row) in self.actions
        return action

    def decide(self, action: do.JoinAction | None, *others: Member, row: Round | None = None) -> do.JoinAction | None:
        """Answer what a candidate wants to know before it seals; the others have sent their rows to its hub."""
        everyone = {each.node: each.to_value() for each in (*others, self.row)}
        while isinstance(action, do.TakeCandidates | do.ReadRows):
            read = ev.RowsRead(row or self.joiner.round, everyone)
            action = self.feed(read if isinstance(action, do.ReadRows) else ev.CandidatesTaken(others))
        return action

    def enter(self, round_: Round) -> do.JoinAction | None:
        """Learn that a round is sealed with this node, as rank 1 at most."""
        action = self.feed(ev.NewerRound(round_))
        assert action == do.Enter(round_, round_.rank_of("me", "i-me"))
        assert self.joiner.state is JoinState.ENTERING
        return action

    def outside(self, round_: Round, reason: str = "cut off") -> do.JoinAction | None:
        """Stay outside of a round whose rank 0 the others have reached."""
        self.candidate(other=member("other"))
        self.enter(round_)
        self.feed(ev.EntryFailed(reason, unreachable=True, me=self.row))
        return self.feed(ev.MembersAnswered([True]))

    def spare(self, round_: Round) -> do.JoinAction | None:
        assert self.feed(ev.Started(round_, {})) == do.GetReady()
        action = self.feed(ev.GotReady(took_time=False))
        assert self.joiner.state is JoinState.SPARE
        return action


# --- a candidate -----------------------------------------------------------------------------------------------------


def test_a_single_node_seals_and_enters():
    node = Node()
    round_ = sealed("me")
    assert node.decide(node.candidate()) == do.ReadHeartbeat()
    assert node.feed(ev.HeartbeatRead(None, 0)) == do.WriteRound(round_)
    assert node.feed(ev.RoundWritten(True)) == do.Enter(round_, 0)
    assert node.actions[0] == do.Forward(round_, to_hub=False)
    assert node.feed(ev.Entered(), ev.MembersReached()) == do.Take()
    assert node.joiner.state is JoinState.IN


def test_a_candidate_enters_the_round_that_another_has_sealed():
    node = Node()
    node.candidate(a=member("a"))
    node.enter(sealed("a", "me"))
    assert node.actions[0] == do.Forward(sealed("a", "me"), to_hub=False)


def test_a_seal_that_came_from_the_hub_is_not_sent_back():
    node = Node()
    assert isinstance(node.candidate(a=member("a")), do.Connect)
    node.feed(ev.Connected(), ev.HubSent(RoundChanged(sealed("a", "me"))))
    node.enter(sealed("a", "me"))
    assert node.actions[0] == do.Forward(sealed("a", "me"), to_hub=False)
    other = Node()
    other.candidate(a=member("a"))
    other.feed(ev.Connected())
    other.enter(sealed("a", "me"))
    assert other.actions[0] == do.Forward(sealed("a", "me"), to_hub=True)


def test_who_was_not_first_reads_what_the_first_has_written():
    node = Node()
    node.decide(node.candidate())
    node.feed(ev.HeartbeatRead(None, 0))
    assert node.feed(ev.RoundWritten(False)) == do.ReadRound()
    assert node.feed(ev.RoundRead(sealed("other"))) == do.GetReady()
    assert node.actions[0] == do.Forward(sealed("other"), to_hub=False)


def test_a_round_that_does_not_fit_a_row_fails_the_run_with_the_number_of_nodes():
    node = Node()
    node.decide(node.candidate())
    node.feed(ev.HeartbeatRead(None, 0))
    write = node.feed(ev.RoundTooLarge("960 KiB."))
    assert write.to.state == "failed"
    assert "A round of 1 nodes does not fit the table: 960 KiB. Lower max_instance_count" in write.to.message
    assert node.feed(ev.RoundWritten(True)) == do.Finish(write.to)
    assert node.joiner.state is JoinState.OVER


def test_nodes_meet_at_the_first_hub_and_write_their_rows_later_if_ever():
    node = Node(minimum=2)
    round_ = Round(2, previous=("a", "me"), expected=("a", "me"))
    connect = node.candidate(round_, a=member("a", 2), me=member("me", 2))
    assert connect == do.Connect(member("a", 2), greeting_of(node.row, round_), "where the nodes of round 2 meet")
    assert node.feed(ev.Connected()) is None, "the hub sends the seal"
    assert node.joiner.deadline == node.now + 1.0
    assert node.until_deadline() == do.WriteRow(node.row, round_)
    assert node.feed(ev.RowWritten()) is None
    assert node.feed(ev.HubSent(SealPosition(0))) == do.TakeCandidates(), "it shall seal"


def candidate_that_wrote_the_round(*known: str, **fields) -> tuple[Node, Round]:
    """Rank 0 of a round that made room for c, which it has reopened itself."""
    node, round_ = Node(minimum=2), Round(2, previous=("me", "b"), **{"expected": ("me", "b", "c"), **fields})
    assert node.feed(ev.Started(round_, {each: member(each) for each in known})) == do.PrepareRow(round_)
    node.row = replace(node.row, round=2)
    node.feed(ev.RowPrepared(node.row, wrote_round=True))
    return node, round_


@pytest.mark.parametrize("lost", [(), ("lost",)])
def test_the_first_survivor_that_has_ended_a_round_seals_the_next_by_what_its_hub_has_received(lost):
    """It asks the table for neither the rows nor the heartbeat: where that throttles, each answer may take seconds."""
    node, round_ = candidate_that_wrote_the_round("me", "b", *lost)
    node.feed(ev.CandidatesTaken([]))
    assert node.feed(ev.Woken(should_seal=True)) == do.TakeCandidates()
    assert node.feed(ev.CandidatesTaken([member("b", 2)])) is None, "c is expected, too"
    node.feed(ev.Woken(should_seal=True))
    write = node.feed(ev.CandidatesTaken([member("b", 2), member("c", 2)]))
    assert write == do.WriteRound(replace(round_, state="sealed", members=(node.row, member("b", 2), member("c", 2))))


def test_rank_0_reads_the_rows_where_not_all_come_soon():
    node, _ = candidate_that_wrote_the_round("me", "b")
    node.feed(ev.CandidatesTaken([]), ev.Woken(should_seal=True), ev.CandidatesTaken([]))
    node.now += 0.1
    action = node.feed(ev.TimerFired())
    while isinstance(action, do.TakeCandidates):
        action = node.feed(ev.CandidatesTaken([]))
    assert action == do.ReadRows()


@pytest.mark.parametrize("c", [{}, {"expected": ("me", "b"), "finishing": ("c",), "finishing_seconds": 60.0}])
def test_rank_0_waits_for_nobody_that_died_with_the_node_whose_loss_ended_the_round_or_while_it_saved(c):
    node, round_ = candidate_that_wrote_the_round("me", "b", "c", **c)
    rows = {each.node: each.to_value() for each in (node.row, member("b", 2), member("c"))}
    look = ev.RowsRead(round_, rows), ev.CandidatesTaken([member("b", 2)])
    node.feed(look[1])
    node.now += 0.1
    assert node.feed(ev.TimerFired(), *look).to == member("c"), "it may only be slow"
    assert node.feed(ev.ConnectFailed(refused=True, me=node.row), *look) == do.ReadHeartbeat()
    assert node.feed(ev.HeartbeatRead(None, 1)).to.members == (node.row, member("b", 2))


def test_a_candidate_whose_hub_ends_goes_to_the_next_one_and_is_the_first_in_the_end():
    node = Node(minimum=2)
    round_ = Round(2, previous=("a", "b", "me"), expected=("a", "b", "me"))
    node.candidate(round_, a=member("a", 2), b=member("b", 2))
    node.feed(ev.Connected())
    assert node.feed(ev.LinkEnded()).to.node == "b", "it had sent nothing: the port may be that of another process"
    assert node.feed(ev.ConnectFailed(refused=True, me=node.row)) == do.TakeCandidates(), "it is the first one now"


def test_a_candidate_whose_hub_falls_silent_looks_whether_the_round_is_sealed():
    """The hub's process is frozen: the kernel accepts another connection, and the seal never comes on it."""
    node = Node(minimum=2)
    node.candidate(a=member("a"), b=member("b"))
    node.feed(ev.Connected())
    node.feed(ev.HubSent(SealPosition()))
    assert node.feed(ev.LinkEnded()).to.node == "a"
    assert node.feed(ev.Connected()) == do.ReadRows()


def test_a_node_that_reaches_no_hub_writes_that_it_cannot_before_it_tries_the_next():
    node = Node(minimum=2)
    node.candidate(a=member("a"), b=member("b"))
    marked = replace(node.row, unreached=("i-a",), reason="me cannot reach a")
    assert node.feed(ev.ConnectFailed(refused=False, me=marked)) == do.WriteRow(marked, Round())
    assert node.actions[0] == do.Offer(Round(), marked)
    assert node.feed(ev.RowWritten()).to.node == "b"


def test_what_the_row_says_of_other_nodes_follows_at_the_hub_and_in_the_table():
    node = Node(minimum=2)
    node.candidate(a=member("a"))
    node.feed(ev.Connected())
    marked = replace(node.row, unreached=("i-b",), reason="me cannot reach b")
    assert node.feed(ev.MarksChanged(marked)) == do.WriteRow(marked, Round())
    assert node.actions[:2] == [do.Offer(Round(), marked), do.Greet(greeting_of(marked, Round()))]


@pytest.mark.parametrize(("changed", "reads"), [(True, "a"), (False, "b")])
def test_a_hub_that_refuses_the_key_is_tried_again_with_another_key_only(changed, reads):
    node = Node(minimum=2)
    node.candidate(a=member("a"), b=member("b"))
    node.feed(ev.Connected())
    assert node.feed(ev.LinkEnded(refused=True)) == do.ReadKey()
    assert node.feed(ev.KeyRead(changed)).to.node == reads


def test_a_row_that_is_gone_is_written_again():
    node = Node(minimum=2)
    action = node.candidate()
    assert action == do.TakeCandidates()
    assert node.feed(ev.CandidatesTaken(())) == do.ReadRows()
    assert node.feed(ev.RowsRead(Round(), {})) == do.TakeCandidates()
    assert node.feed(ev.CandidatesTaken(())) == do.WriteRow(node.row, Round())


# --- rows that went back in time -------------------------------------------------------------------------------------


def test_an_older_row_is_written_again():
    node = Node()
    round_ = Round(4, previous=("me",), expected=("me",))
    assert node.decide(node.candidate(round_), row=Round(2)) == do.Restore(Round(2), round_)
    assert node.feed(ev.RoundRead(Round(5))) == do.PrepareRow(Round(5))


def test_a_round_whose_number_has_run_before_waits_for_a_node_of_that_time_and_then_restores():
    node = Node()
    node.decide(node.candidate())
    assert node.feed(ev.HeartbeatRead("v1", 7)) == do.ReadHeartbeat()
    assert do.NudgeHeartbeat() in node.actions
    assert node.joiner.state is JoinState.RESTORING
    node.feed(ev.HeartbeatRead("v2", 7))
    began = node.now
    while (action := node.until_deadline()) == do.ReadRound():
        assert node.feed(ev.RoundRead(Round())) == do.ReadHeartbeat()
        action = node.feed(ev.HeartbeatRead("v2", 0 if node.now < began + 3 else 7))
        if action is not None:
            break
    assert action == do.Restore(Round(), Round(7, "sealed"))
    assert STALE_SECONDS < node.now - began < STALE_SECONDS + 5
    assert node.feed(ev.RoundRead(Round(8))) == do.PrepareRow(Round(8))


def test_a_node_of_the_later_round_comes_first():
    node = Node()
    node.decide(node.candidate())
    node.feed(ev.HeartbeatRead("v1", 7))
    node.feed(ev.HeartbeatRead("v1", 7))
    assert node.feed(ev.NewerRound(Round(8))) == do.PrepareRow(Round(8))


# --- a spare ---------------------------------------------------------------------------------------------------------


def test_a_spare_beside_a_frozen_round_gives_it_up_although_connections_are_accepted():
    """The kernel accepts for a process that is stopped; only what it sends is a sign of life."""
    node = Node()
    round_ = sealed("a", "b")
    action, began = node.spare(round_), node.now
    beat = ev.HeartbeatRead("v", 1)
    answers = {do.Connect: ev.Connected(), do.ReadRound: ev.RoundRead(round_), do.ReadHeartbeat: beat}
    for turn in range(500):
        if isinstance(action, do.EndRound):
            break
        if action is not None:
            action = node.feed(answers[type(action)])
        elif turn % 5 == 0:
            action = node.feed(ev.LinkEnded())
        else:
            action = node.until_deadline()
    assert isinstance(action, do.EndRound)
    assert (action.to.number, action.to.state, action.to.previous, action.to.expected) == (2, "open", (), ("me",))
    assert node.now - began < 20 + STALE_SECONDS + 5
    assert node.feed(ev.RoundWritten(True)) == do.PrepareRow(action.to)
    assert node.actions[0] == do.Forward(action.to, to_hub=True)


@pytest.mark.parametrize(
    ("members", "answered", "refused", "gives_up"),
    [
        (("a",), True, True, True),
        (("a",), True, False, False),  # its machine does not answer: this node may be cut off
        (("a",), False, True, False),  # as a firewall does
        (("a", "b"), True, True, False),  # b ends the round
    ],
)
def test_a_spare_beside_an_only_member_that_was_killed_does_not_wait_for_its_heartbeat(
    members, answered, refused, gives_up
):
    node, round_ = Node(), sealed(*members)
    node.spare(round_)
    node.feed(ev.Connected())
    if answered:
        node.feed(ev.HubSent(SealPosition()))
    began = node.now
    assert node.feed(ev.LinkEnded()) == do.ReadRound()
    node.feed(ev.RoundRead(round_), ev.HeartbeatRead("v", 1))
    assert isinstance(node.until_deadline(), do.Connect)
    assert node.feed(ev.ConnectFailed(refused, node.row)) == do.ReadRound()
    action = node.feed(ev.RoundRead(round_))
    assert isinstance(action, do.EndRound if gives_up else do.ReadHeartbeat)
    assert node.now - began < 1


def test_a_spare_whose_hub_has_sent_something_reads_once_in_a_while():
    node = Node()
    node.spare(sealed("a"))
    node.feed(ev.Connected(), ev.HubSent(SealPosition()))
    for _ in range(10):
        assert node.until_deadline() == do.ReadRound()
        node.feed(ev.RoundRead(sealed("a")))
        assert node.joiner.deadline == node.now + 20.0


def test_a_spare_that_loses_its_hub_reads_and_connects_again():
    node = Node()
    node.spare(sealed("a"))
    node.feed(ev.Connected(), ev.HubSent(SealPosition()))
    assert node.feed(ev.LinkEnded()) == do.ReadRound()
    assert node.feed(ev.RoundRead(sealed("a"))) == do.ReadHeartbeat()
    node.feed(ev.HeartbeatRead("v", 1))
    assert isinstance(node.until_deadline(), do.Connect)


def test_a_spare_that_members_cannot_reach_says_so_once():
    node = Node()
    node.spare(sealed("a"))
    node.feed(ev.Connected())
    position = ev.HubSent(SealPosition(unreachable_from=("a",)))
    node.feed(position)
    assert node.actions == [do.NoRoom(sealed("a"), ("a",))]
    node.feed(position, ev.HubSent(SealPosition()))
    assert node.actions == []


def test_a_node_that_had_to_get_ready_reads_the_round_again():
    node = Node()
    assert node.feed(ev.Started(sealed("a"), {})) == do.GetReady()
    assert node.feed(ev.GotReady(took_time=True)) == do.ReadRound()
    assert node.feed(ev.RoundRead(Round(2))) == do.PrepareRow(Round(2))


# --- entering --------------------------------------------------------------------------------------------------------


def test_a_hub_with_another_key_is_entered_again_after_the_key_was_read():
    node = Node()
    node.candidate(a=member("a"))
    node.enter(sealed("a", "me"))
    for _ in range(4):
        assert node.feed(ev.Entered(refused=True)) is None
        assert node.until_deadline() == do.ReadKey()
        assert node.feed(ev.KeyRead(True)) == do.Enter(sealed("a", "me"), 1)
    # The agent finds the connection broken.
    assert node.feed(ev.Entered(refused=True), ev.MembersReached()) == do.Take()


@pytest.mark.parametrize(
    ("answers", "heartbeat", "ends"),
    [([False, False, True], None, True), ([True, None], None, False), ([None], 1, False), ([None], 0, True)],
)
def test_the_majority_decides_who_is_cut_off_and_the_heartbeat_where_nobody_answers(answers, heartbeat, ends):
    node = Node()
    node.candidate(a=member("a"))
    round_ = sealed("a", "b", "me")
    node.enter(round_)
    marked = replace(node.row, unreached=("i-a",))
    assert node.feed(ev.EntryFailed("timed out", unreachable=True, me=marked)) == do.QueryMembers(round_)
    action = node.feed(ev.MembersAnswered(answers))
    if heartbeat is not None:
        assert action == do.ReadHeartbeat()
        action = node.feed(ev.HeartbeatRead("v", heartbeat))
    outside = do.WriteRow(replace(marked, state="left", reason="timed out"), round_)
    assert action == (do.Reopen("timed out", frozenset({"a"}), round_failed=True) if ends else outside)


def test_a_node_outside_enters_when_it_can_and_takes_back_that_it_has_left():
    node, round_ = Node(), sealed("a", "b", "me")
    node.outside(round_)
    assert node.feed(ev.RowWritten()) == do.ReadHeartbeat()
    node.feed(ev.HeartbeatRead("v", 1))
    assert node.until_deadline() == do.ReadRound()
    assert node.feed(ev.RoundRead(round_)) == do.Enter(round_, 2, again=True)
    assert node.feed(ev.Entered()) == do.WriteRow(node.row, round_)
    assert node.feed(ev.RowWritten(), ev.MembersReached()) == do.Take()


@pytest.mark.parametrize(
    ("seen", "then"),
    [
        (ev.RoundSeen(), do.Reopen("blocked", round_failed=True, at_once=True)),
        (ev.RoundSeen(lost=frozenset({"a"}), over=True), do.Reopen("blocked", frozenset({"a"}), at_once=True)),
        (ev.RoundSeen(over=True), do.ReadRound()),
    ],
)
def test_a_round_whose_store_or_member_cannot_be_reached_is_ended_unless_it_has(seen, then):
    node = Node()
    node.candidate(a=member("a"))
    node.enter(sealed("a", "me"))
    node.feed(ev.Entered())
    assert node.feed(ev.MemberUnreachable("blocked", seen)) == then


def test_a_node_outside_of_a_round_that_stops_ends_it():
    node, round_ = Node(), sealed("a", "b", "me")
    node.outside(round_)
    action, began = node.feed(ev.RowWritten()), node.now
    while not isinstance(action, do.Reopen) and node.now < began + 100:
        failed = ev.EntryFailed("", unreachable=True, me=node.row)
        answers = {do.ReadRound: ev.RoundRead(round_), do.ReadHeartbeat: ev.HeartbeatRead("v", 1), do.Enter: failed}
        action = node.feed(answers[type(action)]) if action is not None else node.until_deadline()
    assert action == do.Reopen("cut off", frozenset({"a"}), round_failed=True)
    assert STALE_SECONDS < node.now - began < STALE_SECONDS + 5


def test_a_node_outside_goes_on_to_the_next_round_and_writes_that_it_is_back():
    node = Node()
    node.outside(sealed("a", "b", "me"))
    node.feed(ev.RowWritten())
    node.feed(ev.HeartbeatRead("v", 1))
    assert node.feed(ev.NewerRound(Round(2))) == do.PrepareRow(Round(2))
    back = replace(node.row, round=2)
    assert node.feed(ev.RowPrepared(back)) == do.WriteRow(back, Round(2))


def test_a_node_ends_the_round_that_it_has_left_if_nobody_else_has():
    node = Node(last_round=3)
    assert node.feed(ev.Started(sealed("me", "a", number=3), {})) == do.Reopen("me has left the round", at_once=True)
    assert node.feed(ev.EndWritten(mine=True)) == do.ReadRound()


# --- from version to version -----------------------------------------------------------------------------------------


def test_a_version_that_was_acted_on_before_is_acted_on_later_each_time():
    node = Node(last_round=3)
    round_ = sealed("me", number=3)
    node.feed(ev.Started(round_, {}))
    pauses = []
    for _ in range(8):
        node.feed(ev.EndWritten(mine=True))
        node.feed(ev.RoundRead(round_))
        pauses.append(node.joiner.deadline - node.now)
        assert node.until_deadline() == do.Reopen("me has left the round", at_once=True)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])


def test_nodes_that_could_not_connect_wait_longer_before_they_try_again_but_not_for_another_round():
    node = Node()
    assert node.feed(ev.Started(Round(3, failed_rounds=2), {})) is None
    assert node.joiner.deadline - node.now == pytest.approx(0.4)
    assert node.feed(ev.NewerRound(sealed("a", number=3))) == do.GetReady()


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_the_end_of_the_run_ends_every_wait(state):
    end = Round(9, state)
    for wait in (
        lambda node: node.candidate(),
        lambda node: node.spare(sealed("a")),
        lambda node: node.outside(sealed("a", "me")),
    ):
        node = Node()
        wait(node)
        assert node.feed(ev.NewerRound(end)) == do.Finish(end)
        assert node.joiner.state is JoinState.OVER


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_a_node_never_waits_for_ever(block):
    """Any answer to any call, and any news in between: there is always a next look, and at most one call."""
    for seed in range(30 * block, 30 * block + 30):
        live(random.Random(seed))


def live(rng: random.Random) -> None:
    node = Node(minimum=rng.choice((1, 2)))
    number = [1]

    def version() -> Round:
        number[0] += rng.choice((0, 0, 1))
        members = rng.sample(["a", "b", "me"], rng.randint(1, 3))
        return rng.choice(
            (Round(number[0], previous=("a", "me"), expected=("a", "me")), sealed(*members, number=number[0]))
        )

    def rows() -> dict:
        return {name: member(name, number[0]).to_value() for name in ("a", "b", "me") if rng.random() < 0.7}

    def answer(call: do.JoinAction) -> ev.JoinEvent:
        marked = rng.choice((node.joiner.me, replace(node.joiner.me, unreached=("i-a",))))
        chance = rng.random() < 0.5
        return rng.choice(
            {
                do.ReadRound: [ev.RoundRead(version())],
                do.ReadRows: [ev.RowsRead(version(), rows()), ev.RowsUnavailable()],
                do.Restore: [ev.RoundRead(version())],
                do.PrepareRow: [ev.RowPrepared(replace(node.joiner.me, round=node.joiner.round.number))],
                do.WriteRow: [ev.RowWritten()],
                do.WriteRound: [ev.RoundWritten(chance), ev.RoundTooLarge("x")],
                do.EndRound: [ev.RoundWritten(chance)],
                do.ReadHeartbeat: [ev.HeartbeatRead(rng.choice((None, "v")), rng.randint(0, number[0]))],
                do.ReadKey: [ev.KeyRead(chance)],
                do.Connect: [ev.Connected(), ev.ConnectFailed(chance, marked)],
                do.TakeCandidates: [ev.CandidatesTaken([member("a", number[0])] if chance else [])],
                do.Enter: [ev.Entered(chance), ev.EntryFailed("x", chance, marked)],
                do.ReachMembers: [ev.MembersReached(), ev.MemberUnreachable("x", ev.RoundSeen(over=chance))],
                do.QueryMembers: [ev.MembersAnswered([rng.choice((True, False, None))])],
                do.Reopen: [ev.EndWritten(mine=True)],
                do.GetReady: [ev.GotReady(chance)],
            }[type(call)]
        )

    action = node.feed(ev.Started(version(), rows()))
    for _ in range(200):
        if node.joiner.state in (JoinState.IN, JoinState.OVER):
            break
        if isinstance(action, do.Call):
            newer = version()
            is_newer = rng.random() < 0.1 and newer.is_newer_than(node.joiner.round)
            action = node.feed(ev.NewerRound(newer) if is_newer else answer(action))
            continue
        assert node.joiner.deadline < node.now + 100, f"{node.joiner.state} waits for ever"
        news = [ev.Woken(rng.random() < 0.5, rng.random() < 0.2), ev.LinkEnded(rng.random() < 0.3)]
        news += [ev.HubSent(SealPosition(rng.choice((None, 0)))), ev.HubSent(RoundChanged(None)), None, None]
        event = rng.choice(news)
        if event is None:
            action = node.until_deadline()
        else:
            node.now += rng.random()
            action = node.feed(event)
