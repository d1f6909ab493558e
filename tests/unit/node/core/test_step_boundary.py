"""A step boundary between agents: proposed, voted on, decided, reached."""

from __future__ import annotations

import pytest

from azureml_elastic.ipc.agent_messages import Decision, Prepare, Vote
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.core import training_actions as do
from azureml_elastic.node.core import training_events as ev
from azureml_elastic.node.core.training import State
from azureml_elastic.node.core.training_events import Pace
from tests.support.training_rounds import TrainingRound

ABC = ("a", "b", "c")
IN_PROCESS = {"recovery": "in_process"}


def propose(round_: TrainingRound, **vote) -> int:
    """Have rank 0 propose what is due, and all workers vote; return the boundary's number."""
    round_.wait(0.1, round_.leader)
    proposal = [body for body in round_.sent if isinstance(body, Prepare)][-1]
    for node, machine in round_.machines.items():
        if do.AskWorkers(proposal) in round_.take(node):
            for rank in range(round_.round.members[0].slots):
                answer = Vote(proposal.boundary, **{"ok": True, "step": proposal.step - 1, **vote})
                round_.feed(node, ev.WorkerVoted(rank, answer))
            assert machine.state in (State.TRAINING, State.AT_BOUNDARY)
    return proposal.boundary


def decisions(round_: TrainingRound) -> list[Decision]:
    return [body for body in round_.sent if isinstance(body, Decision)]


def test_a_waiting_node_leads_to_a_boundary_that_all_nodes_agree_on():
    round_ = TrainingRound(*ABC, slots=2)
    round_.workers("a", step=4)
    round_.sees("a", waiting=frozenset({"d"}))
    assert propose(round_) == 1
    assert round_.sent[0] == Prepare(1, 5, "rejoin")
    assert decisions(round_) == [Decision(1, go=True)]
    for node in ABC:
        assert round_.take(node) == [do.TellWorkers(Decide(1, go=True))]
        assert round_.machines[node].state is State.AT_BOUNDARY
    assert round_.wait(60.0) == {node: [] for node in ABC}, "nothing more is proposed"


def test_a_node_that_leaves_does_not_stay():
    round_ = TrainingRound(*ABC)
    round_.feed("b", ev.Noticed(round_.now + 20.0))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=True, leavers=("b",))]
    decided = {node: [each for each in round_.take(node) if isinstance(each, do.TellWorkers)] for node in ABC}
    assert decided == {node: [do.TellWorkers(Decide(1, go=True, stay=node != "b"))] for node in ABC}


def test_a_refusal_leads_to_another_proposal_after_a_moment():
    round_ = TrainingRound(*ABC)
    round_.workers("a", step=4)
    round_.sees("a", waiting=frozenset({"d"}))
    propose(round_, ok=False, step=9)
    assert decisions(round_) == [Decision(1, go=False)]
    machine = round_.machines["a"]
    assert machine.state is State.TRAINING
    assert machine.deadline == pytest.approx(round_.now + 0.05)
    propose(round_)
    assert decisions(round_)[-1] == Decision(2, go=True)
    assert Prepare(2, 11, "rejoin") in round_.sent, "further ahead than before"


@pytest.mark.parametrize("absent", ["a", "b"])
def test_a_node_whose_workers_are_not_there_votes_for_them(absent):
    round_ = TrainingRound("a", "b")
    round_.sees("a", waiting=frozenset({"d"}))
    round_.workers(absent, present=frozenset())
    propose(round_)
    assert Vote(1, ok=False, step=0, capable=False) in round_.sent
    assert decisions(round_) == [Decision(1, go=False)]


def test_a_session_that_opens_late_gets_its_step_boundary():
    round_ = TrainingRound("a", "b")
    for node in ("a", "b"):
        round_.workers(node, present=frozenset(), in_session=False)
    round_.sees("a", waiting=frozenset({"c"}))
    assert round_.wait(29.9, "a")["a"] == [], "the imports have 30 s"
    assert round_.wait(0.1, "a")["a"] == [do.AwaitSave(frozenset({"c"}))]
    for node in ("a", "b"):
        round_.workers(node, present=frozenset({0}), in_session=True)
    round_.feed("a", ev.ProgramSaved())
    assert round_.wait(0.1, "a")["a"] == [do.ForgetSaves()]
    propose(round_)
    assert decisions(round_) == [Decision(1, go=True)]


def test_another_nodes_late_session_is_asked_for_again():
    round_ = TrainingRound("a", "b")
    round_.workers("b", present=frozenset(), in_session=False)
    round_.sees("a", waiting=frozenset({"c"}))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=False)]
    round_.workers("b", present=frozenset({0}), in_session=True)
    round_.wait(0.1, "a")
    propose(round_)
    assert decisions(round_)[-1] == Decision(2, go=True)


def test_nothing_is_proposed_once_a_worker_has_finished():
    round_ = TrainingRound("a", "b")
    round_.workers("b", finished=frozenset({0}))
    round_.sees("a", waiting=frozenset({"c"}))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=False)]
    sent = len(round_.sent)
    round_.wait(60.0)
    assert len(round_.sent) == sent


def test_a_node_whose_workers_have_ended_still_votes():
    round_ = TrainingRound("a", "b")
    round_.exit("b", 0, finished=frozenset({0}))
    round_.sees("a", waiting=frozenset({"c"}))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=False)]


def test_nobody_is_let_in_when_the_run_ends_soon_but_the_preempted_go():
    round_ = TrainingRound("a", "b")
    round_.workers("a", pace=Pace(round_.now - 100.0, 0), expected=1000, step=999)
    round_.sees("a", waiting=frozenset({"c"}))
    round_.wait(0.1)
    assert round_.sent == []
    round_.feed("b", ev.Noticed(round_.now + 20.0))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=True, leavers=("b",))]


def test_a_boundary_beyond_the_last_step_is_never_reached_and_the_run_ends_well():
    round_ = TrainingRound("a", "b")
    round_.sees("a", waiting=frozenset({"c"}))
    propose(round_)
    assert round_.machines["b"].state is State.AT_BOUNDARY
    for node in ("a", "b"):
        round_.take(node)
        assert round_.exit(node, 0, finished=frozenset({0})) == [do.ReportDone()]
    assert round_.sees("a", all_done=True) == [do.Close(succeeded=True)]
