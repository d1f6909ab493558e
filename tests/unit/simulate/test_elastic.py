"""Rounds of a simulated elastic run, to the second."""

from __future__ import annotations

import pytest

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.node.core.round import Limits
from azureml_elastic.simulate.elastic import ElasticRun
from azureml_elastic.simulate.scenario import Parameters

DURATIONS = Parameters(
    step_seconds={1: 1.0, 2: 0.5, 3: 0.25},
    start_seconds=10,
    preload_seconds=20,
    first_step_seconds=2,
    restore_seconds=6,
    recovery_seconds={"node loss": 4, "scale-up": 3, "preemption": 5},
    checkpoint_pause_seconds=1,
    checkpoint_write_seconds=8,
    finish_seconds=7,
)


def run_of(nodes, maximum=3, work=1000, every=None, every_steps=None):
    run = ElasticRun(work, Limits(1, maximum), DURATIONS, CheckpointPolicy(every=every, every_steps=every_steps))
    for number in range(nodes):
        run.add(f"n{number}")
    return run


def seconds(run):
    return {(total.activity, total.cause): total.seconds for total in run.accounts.totals()}


def test_a_run_without_losses():
    run = run_of(2)
    run.advance()
    assert run.over
    assert run.now == 10 + 2 + 1000 * 0.5 + 7
    assert seconds(run) == {("training", None): 1000.0, ("starting", None): 24.0, ("idle", None): 14.0}


def test_a_machine_that_is_gone_is_noticed_by_its_silence_and_no_finished_step_is_lost():
    run = run_of(2)
    run.advance(until=12 + 50.25)
    run.lose("n0")
    run.advance(step=101)
    assert run.members == ("n1",)
    assert run.now == 12 + 50.25 + 1 + 4 + 1.0  # silence, recovery, and a step of one node
    assert seconds(run)["lost work", "node loss"] == 0.25  # the step in progress, on the node that is gone
    assert seconds(run)["recovering", "node loss"] == 0.25 + 1 + 4
    assert run.training.lost_steps == 0


def test_a_broken_connection_is_noticed_at_once():
    run = run_of(2)
    run.advance(step=100)
    run.lose("n0", silent=False)
    run.advance(step=101)
    assert run.now == 12 + 50 + 4 + 1.0


def test_a_new_node_enters_after_the_debounce_at_the_end_of_a_step():
    run = run_of(1)
    run.advance(step=10)  # 22 s
    run.add("late")
    run.advance(step=42)
    # It is ready at 22 + 30 s in the middle of the 41st step, and the run makes room for it half a second later.
    assert run.members == ("n0", "late")
    assert run.now == 12 + 41 + 3 + 0.5
    assert seconds(run)["recovering", "scale-up"] == 3
    assert run.training.lost_steps == 0


def test_several_new_nodes_enter_together():
    run = run_of(1)
    run.add("a", ready_in=100.0)
    run.add("b", ready_in=100.25)
    run.advance(step=200)
    assert run.rounds == 2
    assert run.members == ("n0", "a", "b")


def test_no_node_enters_a_full_round_or_one_that_ends_soon():
    full = run_of(3, maximum=3)
    full.add("spare", ready_in=20.0)
    full.advance()
    assert full.rounds == 1
    short = run_of(1, work=40)
    short.advance(step=1)
    short.add("late", ready_in=38.2)  # less than a step is left after the debounce
    short.advance()
    assert short.rounds == 1
    assert short.over


def test_a_node_that_leaves_saves_first():
    run = run_of(2)
    run.advance(until=12 + 10.2)
    run.leave("n0", "preemption")
    run.advance(step=22)
    assert run.training.committed == 21
    assert run.now == 12 + 10.5 + 1 + 8 + 5 + 1.0  # end of the step, save and write, recovery, step
    assert "n0" not in run.nodes


def test_a_preempted_node_whose_step_takes_too_long_leaves_at_its_deadline():
    slow = DURATIONS.model_copy(update={"step_seconds": {2: 100.0}, "serial_fraction": 1.0})
    run = ElasticRun(20, Limits(1, 2), slow, CheckpointPolicy(every=None))
    run.add("n0")
    run.add("n1")
    run.advance(until=12 + 110)
    run.preempt("n0", seconds_left=30.0)
    run.advance(step=2)
    assert run.now == 12 + 110 + 25 + 5 + 100  # grace, recovery, and the step again
    assert seconds(run)["lost work", "preemption"] == 35
    assert run.training.lost_steps == 0


def test_all_nodes_lost_continue_from_the_committed_checkpoint():
    run = run_of(2, every_steps=40)
    run.advance(until=12 + 20 + 1 + 4)  # the checkpoint of step 40 is still being written
    assert (run.training.steps, run.training.committed) == (48, 0)
    run.advance(until=12 + 20 + 1 + 8 + 2)
    run.lose("n0")
    run.lose("n1")
    assert run.training.steps == 60
    lost_at = run.now
    run.advance()  # nothing happens any more
    assert not run.over
    run.add("new")
    # Start, preload, two heartbeats of the table that do not come, first step, restore, a step.
    run.advance(until=lost_at + 30 + 10 + 2 + 6 + 1.0)
    assert run.training.steps == 41
    assert run.training.lost_steps == 20
    assert seconds(run)["lost work", "node loss"] == pytest.approx(20 * 0.5 * 2)


def test_a_checkpoint_whose_write_was_interrupted_is_taken_again():
    run = run_of(2, every_steps=40)
    run.advance(until=12 + 20 + 1 + 4)
    run.lose("n0", silent=False)
    run.advance(step=60)
    assert run.training.committed == 48


def test_the_first_round_waits_for_a_node_that_has_announced_itself():
    run = run_of(1)
    run.add("slow", ready_in=15.0)
    run.advance(step=1)
    assert run.members == ("n0", "slow")
    assert run.now == 15 + 2 + 0.5


def test_a_short_freeze_holds_the_run_up_and_a_long_one_ends_the_round():
    run = run_of(2)
    run.advance(step=10)
    run.freeze("n0", 0.75)
    run.advance(step=20)
    assert run.rounds == 1
    assert run.now == 12 + 10 + 0.0 + 0.75
    run.freeze("n0", 30.0)
    run.advance(step=30)
    assert run.members == ("n1",)
    run.advance(until=run.now + 40)
    assert run.members == ("n1", "n0")
    run.advance()
    assert run.over
    assert sum(seconds(run).values()) == run.accounts.delivered


@pytest.mark.parametrize(("lost", "come", "recover"), [("a", "c", 4 + 25), ("ab", "cd", 2 + 50)])
def test_below_the_minimum_the_survivors_wait_and_nobody_for_one_of_them_that_is_lost_too(lost, come, recover):
    run = ElasticRun(100, Limits(2, 2), DURATIONS, CheckpointPolicy(every=None))
    run.add("a")
    run.add("b")
    run.advance(step=50)
    for name in lost:
        run.lose(name, silent=False)
        run.advance()
    for name in come:
        run.add(name)
    run.advance()
    assert run.training.lost_steps == 50 * (lost == "ab")
    assert run.now == 12 + 25 + 30 + recover + 7
