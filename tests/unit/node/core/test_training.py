"""A member's part in a round: what it does when its workers, other nodes or its own machine fail, leave or end."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest

from azureml_elastic.config import PreemptionPolicy
from azureml_elastic.ipc.agent_messages import HangLesson, Leaving, RanksConnecting
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Hang
from azureml_elastic.node.core.failures import Failure, FailureRecord
from azureml_elastic.node.core.joiner import JoinState
from azureml_elastic.node.core.training import State
from tests.support.paths import ROOT
from tests.support.training_rounds import TrainingRound, failure

ABC = ("a", "b", "c")
IN_PROCESS = {"recovery": "in_process"}
STORE_ENDED = ev.StoreEnded(Failure(0, 1, "RuntimeError: no backend", "store", "signature", conclusive=True))


def state(round_: TrainingRound, node: str) -> State:
    return round_.machines[node].state


def only(actions: list[do.TrainingAction], kind: type) -> object:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def kinds(actions: list[do.TrainingAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --- the end of a round ----------------------------------------------------------------------------------------------


def test_a_lost_node_ends_the_round_and_its_host_gets_a_strike():
    round_ = TrainingRound(*ABC)
    done = round_.sees("a", lost=frozenset({"c"}))
    assert kinds(done) == ["FlushProgress", "StopWorkers", "Reopen"]
    reopen = only(done, do.Reopen)
    assert (reopen.reason, reopen.lost, reopen.failures, reopen.finishing) == ("lost c", {"c"}, (), frozenset())
    assert state(round_, "a") is State.ENDING
    assert round_.feed("a", ev.EndWritten(mine=True)) == [do.Strike("host of c", "lost its connection")]
    assert state(round_, "a") is State.RECOVERING
    assert round_.machines["a"].over


@pytest.mark.parametrize(
    ("lost", "written", "strikes"),
    [
        ({"c"}, ev.EndWritten(mine=False), []),
        ({"c"}, ev.EndWritten(mine=True, left_in_order=frozenset({"c"})), []),
        ({"b", "c"}, ev.EndWritten(mine=True), []),  # of three: a switch, or this node itself
    ],
    ids=["another was first", "left in order", "majority"],
)
def test_there_is_no_strike(lost, written, strikes):
    round_ = TrainingRound(*ABC)
    round_.sees("a", lost=frozenset(lost))
    assert round_.feed("a", written) == strikes
    assert state(round_, "a") is State.RECOVERING


def test_workers_that_stay_are_interrupted_not_stopped():
    round_ = TrainingRound(*ABC, **IN_PROCESS)
    assert kinds(round_.sees("a", over=True)) == ["FlushProgress", "InterruptWorkers", "Reopen"]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"over": True}, "the round was reopened"),
        ({"over": True, "was_given_up": True}, "b did not run for some seconds"),
        ({"over": True, "lost": frozenset({"a", "c"})}, "lost a, c"),
    ],
)
def test_the_reason_says_what_was_seen(seen, reason):
    assert only(TrainingRound(*ABC).sees("b", **seen), do.Reopen).reason == reason


def test_what_happens_while_the_row_is_written_changes_nothing():
    round_ = TrainingRound(*ABC)
    round_.sees("a", lost=frozenset({"c"}))
    assert round_.exit("a", 1) == []
    assert round_.sees("a", lost=frozenset({"b", "c"})) == []
    assert round_.feed("a", STORE_ENDED, ev.Noticed(0.0), ev.TimePassed()) == []


def test_the_end_of_the_store_is_charged_and_no_fault_of_the_network():
    done = TrainingRound(*ABC).feed("a", STORE_ENDED)
    assert kinds(done) == ["RecordFailure", "Log", "FlushProgress", "StopWorkers", "Reopen"]
    reopen = only(done, do.Reopen)
    assert reopen.reason == "the process of the round's store on a ended with exit code 1"
    assert not reopen.round_failed
    assert [(record.kind, record.charge) for record in reopen.failures] == [("store", 1)]


def test_workers_that_stay_go_on_with_another_store():
    done = TrainingRound(*ABC, **IN_PROCESS).feed("a", STORE_ENDED)
    assert kinds(done) == ["RecordFailure", "Log", "FlushProgress", "InterruptWorkers", "Reopen"]
    assert only(done, do.Reopen).lost == frozenset()


def test_a_store_that_cannot_be_served_ends_the_run_with_its_own_error():
    first = only(TrainingRound(*ABC).feed("a", STORE_ENDED), do.Reopen)
    close = only(TrainingRound(*ABC, round_={"failures": first.failures}).feed("a", STORE_ENDED), do.Close)
    assert close.message.startswith(f"{STORE_ENDED.failure.message}\n\nThe process of the round's store on a failed")
    assert "The same error ended the process of the round's store on a" in close.message
    assert "ports" not in close.message


# --- failed workers --------------------------------------------------------------------------------------------------


def fail(round_: TrainingRound, node: str, failures: ev.Failures) -> list[do.TrainingAction]:
    """Have the first worker of a node fail, and its failure be read."""
    code = failures.codes.get(0, 1)
    read = round_.exit(node, code)
    assert kinds(read) == ["InterruptWorkers", "ReadFailures"]
    assert state(round_, node) is State.SETTLING
    return round_.feed(node, failures)


def test_a_failure_that_nothing_explains_is_charged_after_a_moment():
    round_ = TrainingRound(*ABC, max_restarts=1)
    assert fail(round_, "b", failure(fault="a worker ended with SIGSEGV")) == []
    assert round_.machines["b"].deadline == round_.now + 0.5
    assert round_.wait(0.4, "b")["b"] == []
    done = round_.wait(0.1, "b")["b"]
    assert kinds(done) == ["Strike", "FlushProgress", "StopWorkers", "RecordFailure", "Log", "Reopen"]
    assert done[0] == do.Strike("host of b", "a worker ended with SIGSEGV")
    reopen = only(done, do.Reopen)
    assert reopen.reason == "worker 0 on b failed with exit code 1"
    assert reopen.lost == frozenset()
    (record,) = reopen.failures
    assert (record.node, record.charge, record.step) == ("b", 1, 0)
    round_.feed("b", ev.EndWritten(mine=True))
    assert state(round_, "b") is State.RECOVERING


def test_where_processes_stay_the_others_do_not_wait_for_new_ones():
    round_ = TrainingRound(*ABC, **IN_PROCESS)
    fail(round_, "b", failure())
    reopen = only(round_.wait(0.5, "b")["b"], do.Reopen)
    assert reopen.lost == {"b"}
    assert round_.feed("b", ev.EndWritten(mine=True)) == [], "its host is not at fault"


@pytest.mark.parametrize("options", [{}, IN_PROCESS])
@pytest.mark.parametrize("store", [False, True])
def test_the_others_do_not_wait_for_imports_where_the_preload_server_has_ended_with_the_workers(options, store):
    round_ = TrainingRound(*ABC, **options)
    if store:  # which is noticed first
        round_.workers("a", importing=True)
        done = round_.feed("a", STORE_ENDED)
    else:
        round_.exit("a", -9, importing=True)
        done = round_.feed("a", failure(exit_code=137))
    assert only(done, do.Reopen).lost == {"a"}
    assert round_.feed("a", ev.EndWritten(mine=True)) == [], "its host is not at fault"


@pytest.mark.parametrize(("mine", "expected"), [(True, State.FAILED), (False, State.RECOVERING)])
def test_the_last_failure_that_is_allowed_ends_the_run(mine, expected):
    round_ = TrainingRound(*ABC, max_restarts=0)
    fail(round_, "b", failure(exit_code=3))
    close = only(round_.wait(0.5, "b")["b"], do.Close)
    assert not close.succeeded
    assert close.exit_code == 3
    assert close.message.startswith("ValueError: no\n\nWorker 0 on b failed in round 1 at step 0")
    assert len(close.failures) == 1
    round_.feed("b", ev.EndWritten(mine=mine))
    assert state(round_, "b") is expected
    assert round_.machines["b"].closed == close


@pytest.mark.parametrize("node", ["a", "b"], ids=["rank 0's node", "another"])
@pytest.mark.parametrize(
    ("waiting", "maximum", "ends"),
    [({"c"}, 3, False), ((), 3, True), ({"c"}, 2, True)],
    ids=["a node waits", "none waits", "one waits for which there is no room"],
)
def test_the_same_error_is_tried_with_another_world_size(node, waiting, maximum, ends):
    """A sharded state may be loaded only with the number of workers that have saved it."""
    before = replace(failure().failure.record(node, 0), signature="no", world_size=2)
    round_ = TrainingRound("a", "b", maximum=maximum, round_={"failures": (before,)})
    round_.sees("a", waiting=frozenset(waiting))
    same = replace(failure().failure, signature="no", conclusive=True)
    fail(round_, node, replace(failure(), failure=same))
    done = round_.wait(0.5, node)[node]
    assert ("Close" in kinds(done), "Reopen" in kinds(done)) == (ends, not ends)
    if not ends:
        assert "the world size changes from 2 to 3" in only(done, do.Log).text


def test_sigkill_is_nobodys_consequence():
    round_ = TrainingRound(*ABC)
    assert "Reopen" in kinds(fail(round_, "b", failure("killed", 137)))


def test_a_lost_node_explains_a_failure():
    round_ = TrainingRound(*ABC)
    fail(round_, "b", failure(fault="a worker ended with SIGSEGV"))
    done = round_.sees("b", lost=frozenset({"c"}))
    assert kinds(done) == ["FlushProgress", "StopWorkers", "Reopen"]
    assert only(done, do.Reopen).failures == ()


def test_a_broken_connection_waits_until_silence_would_have_been_noticed():
    round_ = TrainingRound(*ABC)
    fail(round_, "b", failure("peer"))
    assert round_.wait(4.9, "b")["b"] == []
    assert only(round_.wait(0.1, "b")["b"], do.Reopen).failures[0].charge == 0


def test_a_node_that_leaves_with_a_failed_worker_says_so_before_it_disconnects():
    """Rank 0's agent would hold the end of its connection against its machine."""
    round_ = TrainingRound(*ABC)
    fail(round_, "b", failure("peer"))
    done = round_.feed("b", ev.Noticed(round_.now + 20.0))
    assert kinds(done) == ["FlushProgress", "StopWorkers", "Disconnect", "Reopen"]
    assert round_.sent[-1] == Leaving()


@pytest.mark.parametrize(("lost", "struck"), [("c", []), ("a", ["host of a"])])
def test_only_who_stands_in_for_a_lost_rank_0_holds_a_loss_against_a_machine(lost, struck):
    """While rank 0 is there, it alone knows who has announced to leave."""
    round_ = TrainingRound(*ABC)
    round_.sees("b", lost=frozenset(lost))
    done = round_.feed("b", ev.EndWritten(mine=True))
    assert sorted(action.host for action in done if isinstance(action, do.Strike)) == struck


def test_rank_0_that_leaves_writes_the_row_before_the_others_notice():
    round_ = TrainingRound(*ABC)
    round_.feed("a", ev.Noticed(round_.now + 20.0))
    assert kinds(round_.wait(20.0, "a")["a"])[-3:] == ["FlushProgress", "StopWorkers", "Reopen"]


def test_the_end_of_the_store_explains_a_broken_connection_alone():
    round_ = TrainingRound(*ABC)
    fail(round_, "a", failure("peer"))
    assert [record.kind for record in only(round_.feed("a", STORE_ENDED), do.Reopen).failures] == ["store"]
    other = TrainingRound(*ABC)
    fail(other, "a", failure("user"))
    assert other.feed("a", STORE_ENDED) == []


def test_ones_own_preemption_explains_a_failure():
    """A preempted container's processes all get SIGTERM."""
    round_ = TrainingRound(*ABC)
    fail(round_, "b", failure("killed", 143))
    done = round_.feed("b", ev.Noticed(round_.now + 20.0))
    assert kinds(done) == ["FlushProgress", "StopWorkers", "Disconnect", "Reopen"]
    assert only(done, do.StopWorkers).seconds == 20.0
    assert (only(done, do.Reopen).reason, only(done, do.Reopen).lost) == ("b was preempted", {"b"})
    assert round_.feed("b", ev.EndWritten(mine=True)) == []
    assert state(round_, "b") is State.LEFT


def test_a_worker_that_gave_way_has_not_failed():
    round_ = TrainingRound(*ABC)
    read = round_.exit("b", 1, gave_way=frozenset({0}))
    assert only(read, do.ReadFailures).gave_way == {0}
    assert round_.feed("b", ev.Failures()) == []
    reopen = only(round_.wait(0.5, "b")["b"], do.Reopen)
    assert reopen.round_failed
    assert reopen.reason == "a worker on b could not go on with the round"
    assert reopen.failures == ()


@pytest.mark.parametrize(
    ("codes", "finished", "trained", "free"),
    [
        ({0: -6}, {0}, True, True),
        ({0: -6, 1: -15}, {0}, True, True),
        ({0: -6, 1: -6}, {0}, True, False),
        ({0: -6}, {0}, False, False),
        ({0: -11}, {0}, True, False),
        ({0: -15}, {0}, True, False),
    ],
)
def test_an_abort_after_training_is_free_if_the_round_has_trained(codes, finished, trained, free):
    round_ = TrainingRound(*ABC, slots=2)
    round_.exit("b", *codes.values(), finished=frozenset(finished), trained=trained)
    round_.feed("b", failure("crashed", 134, codes=codes))
    reopen = only(round_.wait(0.5, "b")["b"], do.Reopen)
    assert (reopen.failures == ()) == free


def test_those_beside_a_failed_worker_hand_over_and_what_they_sent_arrives_first():
    round_ = TrainingRound(*ABC, slots=2)
    assert round_.exit("b", 1, leaving=True) == [do.InterruptWorkers()]
    assert state(round_, "b") is State.COLLECTING
    assert round_.wait(5.0, "b")["b"] == []
    assert kinds(round_.workers("b", leaving=False)) == ["ReadFailures"]


def test_a_sibling_that_hangs_does_not_hold_up_the_end():
    round_ = TrainingRound(*ABC, slots=2, handover_timeout=timedelta(seconds=7))
    round_.exit("b", 1, leaving=True)
    assert round_.wait(11.9, "b")["b"] == []
    assert kinds(round_.wait(0.1, "b")["b"]) == ["ReadFailures"]


def test_a_lost_node_ends_the_wait_for_siblings():
    round_ = TrainingRound(*ABC, slots=2)
    round_.exit("b", 1, leaving=True)
    assert only(round_.sees("b", lost=frozenset({"c"})), do.Reopen).lost == {"c"}


@pytest.mark.parametrize(
    ("names", "seconds", "store", "connected"),
    [(ABC, 100.0, False, False), (ABC, 1.0, True, True), (("a",), 59.0, False, False), (("a",), 60.0, False, True)],
)
def test_a_failure_is_before_the_workers_have_connected_or_after(names, seconds, store, connected):
    round_ = TrainingRound(*names, opens_session=False)
    if store:
        round_.feed("a", ev.StoreUsed())
    round_.wait(seconds)
    fail(round_, "a", failure())
    record: FailureRecord = only(round_.wait(0.5, "a")["a"], do.Reopen).failures[0]
    assert record.connected == connected
    assert record.step is None, "a program without a session counts no steps"


# --- the good end ----------------------------------------------------------------------------------------------------


def finish(round_: TrainingRound, *nodes: str) -> None:
    for node in nodes:
        assert round_.exit(node, 0, finished=frozenset({0})) == [do.ReportDone()]
        assert state(round_, node) is State.DONE


def test_rank_0_marks_the_good_end_when_all_are_done():
    round_ = TrainingRound(*ABC)
    finish(round_, "a")
    assert round_.wait(60.0, "a")["a"] == []
    assert round_.sees("a", all_done=True) == [do.Close(succeeded=True)]
    round_.feed("a", ev.EndWritten(mine=True))
    assert state(round_, "a") is State.SUCCEEDED
    assert not round_.machines["a"].keeps_state


def test_the_others_make_sure_that_it_has():
    round_ = TrainingRound(*ABC)
    finish(round_, *ABC)
    for node in ("b", "c"):
        assert round_.sees(node, all_done=True) == []
        assert state(round_, node) is State.CLOSING
    assert round_.sees("b", over=True) == [do.Close(succeeded=True)]
    assert round_.wait(1.9, "c")["c"] == []
    assert round_.wait(0.1, "c")["c"] == [do.Close(succeeded=True)]
    round_.feed("c", ev.EndWritten(mine=False))
    assert state(round_, "c") is State.RECOVERING, "joining tells how the run has ended"


def test_a_node_is_done_when_the_last_messages_of_its_workers_are_there():
    round_ = TrainingRound(*ABC, slots=2)
    assert round_.exit("b", 0, leaving=True) == []
    assert state(round_, "b") is State.TRAINING, "one of two"
    assert round_.exit("b", 0, 0, leaving=True) == []
    assert round_.workers("b", leaving=False) == [do.ReportDone()]


def test_connections_that_do_not_end_are_not_waited_for_for_ever():
    round_ = TrainingRound(*ABC)
    round_.exit("b", 0, leaving=True)
    assert round_.wait(4.9, "b")["b"] == []
    assert round_.wait(0.1, "b")["b"] == [do.ReportDone()]


def test_a_node_that_is_done_repeats_the_round_with_the_others():
    round_ = TrainingRound(*ABC)
    finish(round_, "a", "b")
    assert only(round_.sees("a", lost=frozenset({"c"})), do.Reopen).lost == {"c"}


# --- preemption ------------------------------------------------------------------------------------------------------


def test_a_notice_is_announced_once_and_ends_the_round_when_its_time_is_over():
    round_ = TrainingRound(*ABC)
    machine, until = round_.machines["b"], round_.now + 20.0
    assert kinds(round_.feed("b", ev.Noticed(until, "SIGTERM"))) == ["Log"]
    assert round_.sent == [Leaving()]
    assert machine.deadline == until
    assert round_.feed("b", ev.Noticed(until - 5.0, "SIGTERM")) == [], "an earlier deadline is no other notice"
    assert round_.wait(14.9, "b")["b"] == []
    done = round_.wait(0.1, "b")["b"]
    assert kinds(done) == ["FlushProgress", "StopWorkers", "Disconnect", "Reopen"]
    assert only(done, do.Reopen).lost == {"b"}
    assert only(done, do.StopWorkers).seconds == 0.0
    round_.feed("b", ev.EndWritten(mine=True))
    assert state(round_, "b") is State.LEFT
    assert round_.machines["b"].keeps_state, "it may be the last one to hold a state"


def test_the_others_wait_for_what_a_program_without_a_session_saves_at_its_end():
    grace = PreemptionPolicy(grace=timedelta(seconds=21))
    round_ = TrainingRound(*ABC, opens_session=False, preemption=grace)
    round_.feed("b", ev.Noticed(round_.now + 20.0))
    reopen = only(round_.wait(0.1, "a")["a"], do.Reopen)
    assert reopen.reason == "preempted: b"
    assert (reopen.lost, reopen.finishing, reopen.finishing_seconds) == ({"b"}, {"b"}, 21.0)
    assert round_.feed("a", ev.EndWritten(mine=True)) == [], "who leaves in order gets no strike"


# --- newcomers without a step boundary -------------------------------------------------------------------------------


def test_newcomers_do_not_stop_a_program_without_a_session_at_once():
    round_ = TrainingRound(*ABC, opens_session=False)
    round_.feed("a", ev.StoreUsed())
    assert round_.sees("a", waiting=frozenset({"d"})) == []
    assert round_.wait(0.1, "a")["a"] == [do.AwaitSave(frozenset({"d"}))]
    assert round_.wait(3600.0, "a")["a"] == []
    round_.feed("a", ev.ProgramSaved())
    done = round_.wait(0.1, "a")["a"]
    assert done[0] == do.HoldWorkers()
    assert only(done, do.Reopen).reason == "joining: d"


def test_a_job_may_limit_how_long_newcomers_wait():
    round_ = TrainingRound(*ABC, opens_session=False, newcomer_timeout=timedelta(seconds=30))
    round_.sees("a", waiting=frozenset({"d"}))
    round_.wait(0.0, "a")
    assert round_.machines["a"].deadline == round_.now + 30.0
    assert only(round_.wait(30.0, "a")["a"], do.Reopen).reason == "joining: d"


def test_newcomers_join_an_engine_at_once():
    round_ = TrainingRound(*ABC, opens_session=False, framework="dask")
    assert round_.wait(0.1, "a")["a"] == []
    round_.sees("a", waiting=frozenset({"d"}))
    assert only(round_.wait(0.1, "a")["a"], do.Reopen).reason == "joining: d"


def test_all_agents_learn_once_that_workers_have_begun_to_connect():
    """The store in which that shows is that of rank 0's agent, and any agent may have to judge a failure."""
    round_ = TrainingRound(*ABC)
    round_.feed("a", ev.StoreUsed(), ev.StoreUsed())
    assert round_.sent == [RanksConnecting()]
    for node in ABC:
        assert round_.take(node) == [do.NoteConnecting()]
        assert round_.machines[node].connecting


# --- engines ---------------------------------------------------------------------------------------------------------


def test_an_engine_that_has_ended_ends_the_run_whatever_has_happened_to_others():
    round_ = TrainingRound(*ABC, opens_session=False, framework="dask")
    assert round_.feed("a", ev.ProgramEnded()) == [do.Close(succeeded=True)]
    other = TrainingRound(*ABC, opens_session=False, framework="dask")
    assert other.feed("b", ev.ProgramEnded()) == []
    assert other.sees("b", lost=frozenset({"a"}), over=True) == [do.Close(succeeded=True)]


def test_an_engine_moves_what_it_holds_before_its_node_leaves():
    round_ = TrainingRound(*ABC, opens_session=False, framework="dask")
    assert kinds(round_.feed("b", ev.Noticed(round_.now + 20.0))) == ["Log", "MoveEngine"]
    assert round_.sent == []
    round_.workers("b", stopped=frozenset({0}))
    round_.workers("b", step=1)
    assert round_.sent == [Leaving()]
    assert only(round_.wait(0.1, "a")["a"], do.Reopen).reason == "preempted: b"


# --- hangs -----------------------------------------------------------------------------------------------------------

HANG = Hang(7, 301.0, 300.0, "step")


def hung() -> ev.Hung:
    return ev.Hung(HANG, failure("hang").failure)


def test_all_nodes_write_their_stacks_before_rank_0_ends_a_round_that_hangs():
    round_ = TrainingRound(*ABC)
    assert round_.feed("a", hung()) == [do.RecordHang(HANG), do.WriteStacks(HANG)]
    for node in ("b", "c"):
        assert round_.take(node) == [do.AdoptVerdict(HANG), do.WriteStacks(HANG)]
    assert round_.feed("c", ev.StacksWritten()) == []
    assert round_.feed("a", ev.StacksWritten()) == []
    assert round_.wait(4.0) == {node: [] for node in ABC}
    round_.feed("b", ev.StacksWritten())
    done = round_.take("a")[2:]
    assert kinds(done) == ["FlushProgress", "StopWorkers", "RecordFailure", "Log", "Reopen"]
    assert only(done, do.Reopen).reason == HANG.reason
    assert only(done, do.Reopen).failures[0].kind == "hang"


def test_a_node_that_does_not_answer_is_waited_for_a_few_seconds():
    round_ = TrainingRound(*ABC)
    round_.feed("a", hung(), ev.StacksWritten())
    assert round_.machines["a"].deadline == round_.now + 5.0
    assert round_.wait(4.9, "a")["a"] == []
    assert "Reopen" in kinds(round_.wait(0.1, "a")["a"])


def test_where_rank_0s_agent_is_stuck_another_one_acts_alone():
    round_ = TrainingRound(*ABC)
    assert round_.feed("b", hung()) == [do.RecordHang(HANG), do.WriteStacks(HANG)]
    assert round_.sent == []
    assert "Reopen" in kinds(round_.feed("b", ev.StacksWritten()))


def test_a_verdict_of_another_round_is_not_obeyed():
    round_ = TrainingRound(*ABC)
    round_.feed("a", hung())
    (dump,) = round_.sent
    later = TrainingRound(*ABC, round_={"number": 2})
    assert later.feed("b", ev.FromLeader(dump)) == []


def test_what_rank_0_has_learned_reaches_all():
    round_ = TrainingRound(*ABC)
    round_.feed("a", ev.Learned(HangLesson(3.0, 4.0)))
    assert all(round_.take(node) == [do.LearnLesson(HangLesson(3.0, 4.0))] for node in ABC)


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_deadline_is_a_moment_to_come():
    """What is due already waits for something else to happen: an agent must not spin."""
    round_ = TrainingRound("a", "b")
    machine = round_.machines["b"]
    assert machine.deadline == float("inf")
    round_.feed("b", ev.Noticed(round_.now + 20.0))
    assert machine.deadline == round_.now + 20.0
    round_.wait(20.0)
    assert machine.deadline == float("inf")


def test_the_page_about_the_inside_of_a_node_has_every_state():
    page = (ROOT / "docs" / "internals" / "node.md").read_text()
    assert [each.name for each in (*State, *JoinState) if f" {each.name}" not in page] == []


def test_its_files_that_follow_a_lost_node_are_there_and_few():
    page = (ROOT / "docs" / "internals" / "node.md").read_text()
    section = page.split("## A lost node\n")[1].split("\n## ")[0]
    files = set(re.findall(r"`(\w+(?:/\w+)*\.py)`", section))
    assert [each for each in files if not (ROOT / "src" / "azureml_elastic" / "node" / each).is_file()] == []
    assert 0 < len(files) <= 15
