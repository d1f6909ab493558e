"""A step boundary between agents: proposed, voted on, decided, reached."""

from __future__ import annotations

import pytest

from azureml_elastic.ipc.agent_messages import Decision, NodeStopped, NodesWait, Prepare, Vote
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Pace
from azureml_elastic.node.core.training import State
from tests.support.training_rounds import TrainingRound, failure

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
    assert round_.sent[:2] == [NodesWait(("d",)), Prepare(1, 5, "rejoin")]
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
    assert round_.sent == [NodesWait(("c",))]
    round_.feed("b", ev.Noticed(round_.now + 20.0))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=True, leavers=("b",))]


# --- at the agreed step ----------------------------------------------------------------------------------------------


def agree(*names: str, leavers: str = "", **options) -> TrainingRound:
    """Return a round whose workers have all agreed to stop, some of them to leave, the others for a new node."""
    round_ = TrainingRound(*names, **options)
    for node in leavers:
        round_.feed(node, ev.Noticed(round_.now + 20.0))
    round_.sees(round_.leader, waiting=frozenset({"new"}))
    propose(round_)
    assert decisions(round_) == [Decision(1, go=True, leavers=tuple(leavers))]
    for node, machine in round_.machines.items():
        round_.take(node)
        assert machine.state is State.AT_BOUNDARY
    return round_


def stop(round_: TrainingRound, *nodes: str) -> None:
    """Have the workers of nodes stop after they have saved."""
    for node in nodes:
        round_.workers(node, stopped=frozenset(range(round_.round.members[0].slots)))


def states(round_: TrainingRound) -> list[str]:
    return [machine.state.value for machine in round_.machines.values()]


def reopened(actions: list[do.TrainingAction]) -> do.Reopen:
    (found,) = [action for action in actions if isinstance(action, do.Reopen)]
    return found


@pytest.mark.parametrize("last", ABC)
def test_rank_0_ends_the_round_only_when_all_have_stopped(last):
    """A slower node still saves, and an end of the round would cut that short."""
    round_ = agree(*ABC)
    stop(round_, *(node for node in ABC if node != last))
    assert round_.wait(60.0) == {node: [] for node in ABC}
    stop(round_, last)
    assert states(round_) == ["stopped"] * 3
    done = round_.wait(0.1)
    assert reopened(done["a"]).reason == "rescale at a step boundary"
    assert reopened(done["a"]).lost == frozenset()
    assert done["b"] == done["c"] == []
    assert "Reopen" in [type(action).__name__ for action in round_.sees("b", over=True)], "it makes sure that it is"


def test_a_node_has_stopped_when_all_its_workers_have():
    round_ = agree("a", "b", slots=2)
    round_.workers("a", stopped=frozenset({1}))
    stop(round_, "b")
    assert states(round_) == ["at boundary", "stopped"]
    stop(round_, "a")
    assert reopened(round_.wait(0.1)["a"]).lost == frozenset()


def test_exit_codes_after_the_stop_mean_nothing():
    round_ = agree(*ABC)
    stop(round_, "b")
    assert round_.exit("b", 1) == []
    assert states(round_) == ["at boundary", "stopped", "at boundary"]


def test_a_leaver_that_has_stopped_is_free_to_go_and_its_loss_means_nothing():
    round_ = agree(*ABC, leavers="b")
    stop(round_, "b")
    assert [type(action).__name__ for action in round_.take("b")] == ["FlushProgress", "StopWorkers", "Disconnect"]
    assert round_.machines["b"].state is State.LEFT
    assert not round_.machines["b"].keeps_state, "it has saved with the others"
    for node in ("a", "c"):
        assert round_.sees(node, lost=frozenset({"b"})) == []
    stop(round_, "c", "a")
    done = round_.wait(0.1, "a", "c")
    assert reopened(done["a"]).lost == {"b"}
    assert done["c"] == []
    assert round_.feed("a", ev.EndWritten(mine=True)) == [], "nor is its host at fault"


def test_a_leaver_that_is_lost_before_it_has_stopped_ends_the_boundary_as_a_loss():
    round_ = agree(*ABC, leavers="b")
    stop(round_, "c")
    assert round_.sees("c", lost=frozenset({"b"})) == [], "only rank 0's agent knows whether it has stopped"
    reopen = reopened(round_.sees("a", lost=frozenset({"b"})))
    assert (reopen.reason, reopen.lost) == ("lost b", {"b"})
    assert reopened(round_.sees("c", over=True)).lost == {"b"}


def test_a_decision_is_taken_before_the_loss_of_who_leaves_by_it_and_a_proposal_after_the_workers_report():
    decision, proposal = ev.FromLeader(Decision(1, True, ("c",))), ev.FromLeader(Prepare(2, 9, "leave"))
    stopped = ev.FromMember("b", NodeStopped())
    assert ev.in_order([decision, proposal, stopped]) == ([decision, stopped], [proposal])


@pytest.mark.parametrize("stopped", ["", "c", "bc"])
def test_a_member_that_is_lost_meanwhile_ends_the_boundary_as_a_loss(stopped):
    round_ = agree(*ABC, leavers="b")
    stop(round_, *stopped)
    for node in "ab" if "b" not in stopped else "a":
        reopen = reopened(round_.sees(node, lost=frozenset({"c"})))
        assert reopen.reason == "lost c"
        assert reopen.lost == {"b", "c"}, "who leaves will not be back either"


def test_a_member_that_is_lost_in_the_moment_in_which_the_last_one_stops_is_not_waited_for():
    round_ = agree(*ABC)
    stop(round_, *ABC)
    assert reopened(round_.sees("a", lost=frozenset({"c"}))).lost == {"c"}


def test_rank_0_that_is_gone_before_it_has_ended_the_round_was_preempted():
    """Its notice has ended while it still saved, so that it has recorded nothing of it."""
    round_ = agree(*ABC, leavers="a")
    reopen = reopened(round_.sees("b", lost=frozenset("a"), over=True))
    assert (reopen.reason, reopen.lost) == ("a was preempted", {"a"})


def test_rank_0_that_leaves_goes_last():
    round_ = agree(*ABC, leavers="a")
    stop(round_, "a", "b")
    assert round_.machines["a"].state is State.STOPPED
    stop(round_, "c")
    done = round_.wait(0.1, "a")["a"]
    assert reopened(done).lost == {"a"}
    round_.feed("a", ev.EndWritten(mine=True))
    assert round_.machines["a"].state is State.LEFT


def test_the_loss_of_rank_0_while_others_still_save_is_a_loss():
    round_ = agree(*ABC, leavers="c")
    stop(round_, "b", "c")
    assert reopened(round_.sees("b", lost=frozenset({"a"}), over=True)).lost == {"a", "c"}


def crash(round_: TrainingRound, node: str) -> list[do.TrainingAction]:
    """Have a worker fail; return what is done within the time in which a failure is explained."""
    round_.exit(node, 134)
    round_.feed(node, failure("crashed", 134, fault="a worker ended with SIGABRT"))
    round_.wait(0.5, node)
    return round_.take(node)


def test_a_crash_beside_a_leaver_that_has_gone_is_not_charged():
    round_ = agree(*ABC, leavers="b")
    stop(round_, "b")
    done = crash(round_, "c")
    assert reopened(done).failures == ()
    assert reopened(done).round_failed
    assert reopened(done).lost == {"b"}
    assert not [action for action in done if isinstance(action, do.Strike | do.RecordFailure)]


def test_a_crash_at_a_boundary_that_nobody_leaves_at_is_the_workers_own():
    done = crash(agree(*ABC), "c")
    assert len(reopened(done).failures) == 1
    assert do.Strike("host of c", "a worker ended with SIGABRT") in done


def test_a_time_that_is_over_ends_the_boundary():
    round_ = agree(*ABC, leavers="b")
    assert reopened(round_.wait(20.0, "b")["b"]).lost == {"b"}


def test_a_notice_after_the_decision_keeps_the_node_out_of_the_next_round():
    round_ = agree(*ABC)
    round_.feed("c", ev.Noticed(round_.now + 20.0))
    stop(round_, *ABC)
    assert round_.machines["c"].state is State.STOPPED, "its workers were to stay"
    assert reopened(round_.wait(0.1, "a")["a"]).lost == {"c"}
    round_.sees("c", over=True)
    round_.feed("c", ev.EndWritten(mine=False))
    assert round_.machines["c"].state is State.LEFT


def test_a_boundary_beyond_the_last_step_is_never_reached_and_the_run_ends_well():
    round_ = agree("a", "b")
    for node in ("a", "b"):
        assert round_.exit(node, 0, finished=frozenset({0})) == [do.ReportDone()]
    assert round_.wait(60.0) == {"a": [], "b": []}
    assert round_.sees("a", all_done=True) == [do.Close(succeeded=True)]


def test_a_worker_that_ends_before_the_decision_on_a_step_beyond_its_last_one_counts_too():
    round_ = TrainingRound("a", "b")
    round_.sees("a", waiting=frozenset({"c"}))
    round_.wait(0.1, "a")
    round_.feed("b", ev.WorkerVoted(0, Vote(1, ok=True, step=0)))
    round_.exit("b", 0, finished=frozenset({0}))
    round_.feed("a", ev.WorkerVoted(0, Vote(1, ok=True, step=0)))
    assert decisions(round_) == [Decision(1, go=True)]
    assert states(round_) == ["at boundary", "done"]
    stop(round_, "a")
    assert reopened(round_.wait(0.1)["a"]).lost == frozenset(), "the other one has finished, and repeats the round"


def test_one_that_finishes_does_not_keep_those_waiting_that_have_stopped():
    round_ = agree(*ABC)
    stop(round_, "a", "b")
    round_.exit("c", 0, finished=frozenset({0}))
    assert reopened(round_.wait(0.1, "a")["a"]).reason == "rescale at a step boundary"
