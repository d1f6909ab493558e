"""A lost peer costs no completed step: the survivors hand their state over, or continue in a new process group."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing, suppress

import psutil
import pytest
import torch

from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST
from tests.support.shards import by_name
from tests.support.train import recovering
from tests.support.train.fake_agent import AssigningAgent
from tests.support.worlds import World

EPOCHS = 5
STEPS = EPOCHS * 4


@pytest.fixture
def agent(tmp_path):
    with closing(AssigningAgent(tmp_path / "agent")) as fake:
        yield fake
        for descriptor in fake.kept:
            os.close(descriptor)


def environment(agent, number, victim):
    return {"AZUREML_ELASTIC_CHANNEL": agent.path, "AZUREML_ELASTIC_ROUND": number, "VICTIM": victim}


def until_hit(process):
    """Wait until a process is dead or frozen."""
    over = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    with suppress(psutil.NoSuchProcess):
        recovering.until(lambda: psutil.Process(process.pid).status() in over)


def until_interrupted(agent, world):
    """Wait until the third worker is dead or frozen, and send the end of the round to the others."""
    received = agent.wait_for_all(step=3 * 8)
    assert {rank for rank, _ in received["step"]} == {0, 1, 2}
    until_hit(world.processes[2])
    agent.interrupt()


def undisturbed(tmp_path):
    return World(2, recovering.train_on, tmp_path / "alone", EPOCHS).values()[0][-1]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_survivors_hand_over_and_new_processes_continue(agent, tmp_path, fault):
    arguments = (tmp_path / "c", EPOCHS, fault, 9)
    world = World(3, recovering.train_on, *arguments, **environment(agent, 1, victim=2))
    until_interrupted(agent, world)
    said = agent.wait_for_all(gave_way=2, gone=2)["gave_way"]
    assert {rank for rank, _ in said} == {0, 1}, "the agent need not guess it from an exit code"
    world.processes[2].kill()
    codes = [outcome.code for outcome in world.outcomes()]
    assert codes == [EXIT_AGENT_LOST, EXIT_AGENT_LOST, -signal.SIGKILL]
    assert agent.memory["step"] == 8
    values = World(2, recovering.train_on, tmp_path / "c", EPOCHS, **environment(agent, 2, victim=-1)).values()
    assert [value[:3] for value in values] == [[8, STEPS, 2]] * 2
    assert values[0][-2] == STEPS
    assert values[0][-3] == values[1][-3], "weights that nothing restores are those of rank 0"
    assert values[0][-1] == pytest.approx(undisturbed(tmp_path), abs=1e-9)


@pytest.mark.parametrize("normalised", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_survivors_continue_and_a_new_process_joins(agent, tmp_path, fault, normalised):
    arguments = (tmp_path / "c", EPOCHS, fault, 9, normalised)
    agent.expect(3)
    world = World(3, recovering.train_on, *arguments, **environment(agent, 0, victim=2))
    until_interrupted(agent, world)
    agent.expect(2)
    ((_, restored),) = agent.wait_for_all(restored=1)["restored"]
    assert restored["step"] == 8
    world.processes[2].kill()
    outcomes = world.outcomes()
    assert [outcome.code for outcome in outcomes] == [0, 0, -signal.SIGKILL], outcomes
    values = [outcome.value for outcome in outcomes[:2]]
    assert [value[1:3] for value in values] == [[STEPS, 2]] * 2
    assert {value[3] for value in values} == {process.pid for process in world.processes[:2]}
    assert {value[-2] for value in values} == {STEPS}
    assert values[0][-3:] == values[1][-3:]
    if not normalised:
        assert values[0][-1] == pytest.approx(undisturbed(tmp_path), abs=1e-9)


@pytest.mark.parametrize("kind", ["hooked", "averaged", "unseen"])
def test_a_device_behind_the_host_hands_over_completed_steps_alone(agent, tmp_path, kind):
    arguments = (tmp_path / "c", kind)
    world = World(2, recovering.on_a_deferred_device, *arguments, **environment(agent, 1, victim=1))
    agent.wait_for_all(step=2 * 2)
    until_hit(world.processes[1])
    if kind != "hooked":  # until the update is queued, the state is that of step 2
        recovering.until((tmp_path / "queued-0").exists)
    agent.interrupt(victim=1)
    agent.wait_for_all(gave_way=1, gone=1)
    outcomes = world.outcomes()
    assert [outcome.code for outcome in outcomes] == [EXIT_AGENT_LOST, -signal.SIGKILL], outcomes
    if kind != "hooked":
        assert agent.memory is None, "whether the update is complete is not known"
        return
    kept = Snapshot.from_memory(agent.memory["path"])
    assert kept.step == agent.memory["step"] == 2
    assert all(tensor.abs().max() < 10 for tensor in kept.tensors.values())
    assert '"lr": 0.05' in json.dumps(kept.state["optimizer"]), "the rate is not that of the step, which is scaled"


@pytest.mark.parametrize("kind", ["closure", "update", "exchanged"])
def test_weights_are_handed_over_if_they_are_those_of_a_step(agent, tmp_path, kind, capfd):
    world = World(2, recovering.within_an_update, tmp_path / "c", kind, **environment(agent, 1, victim=1))
    agent.wait_for_all(step=2 * 2)
    until_hit(world.processes[1])
    agent.interrupt(victim=1)
    agent.wait_for_all(gave_way=1, gone=1)
    codes = [outcome.code for outcome in world.outcomes()]
    assert codes == [EXIT_AGENT_LOST, -signal.SIGKILL]
    if kind != "closure":
        assert agent.memory is None, "the update is half done, or the weights are others"
        return
    kept = Snapshot.from_memory(agent.memory["path"])
    assert kept.step == agent.memory["step"] == 2
    tensors = by_name(kept)
    model, optimizer = torch.load(tmp_path / "step-2-0")
    assert model["0.num_batches_tracked"] > 0
    for name, value in model.items():
        assert torch.equal(tensors[f"model/{name}"], value), name
    (state,) = optimizer["state"].values()
    (directions,) = [each for name, each in tensors.items() if name.endswith("/prev_flat_grad")]
    assert torch.equal(directions, state["prev_flat_grad"])


def test_after_a_shrink_the_expected_steps_are_reported_again(agent, tmp_path):
    agent.expect(3)
    world = World(3, recovering.with_a_batch_per_worker, tmp_path / "c", 5, **environment(agent, 0, victim=2))
    begun = agent.wait_for_all(expects=3, step=3 * 4)
    assert {message["steps"] for _, message in begun["expects"]} == {48 // (2 * 3)}
    until_hit(world.processes[2])
    agent.interrupt()
    agent.expect(2)
    again = agent.wait_for_all(expects=2)
    remaining = (48 - 4 * 6) // (2 * 2)
    assert {message["steps"] for _, message in again["expects"]} == {4 + remaining}
    outcomes = world.outcomes()
    assert [outcome.code for outcome in outcomes] == [0, 0, -signal.SIGKILL], outcomes
    assert [outcome.value for outcome in outcomes[:2]] == [4 + remaining] * 2


def test_a_peer_lost_in_a_collective_of_the_script_costs_no_step(agent, tmp_path):
    world = World(2, recovering.user_collective, tmp_path / "c", 5, **environment(agent, 1, victim=1))
    agent.wait_for("gone")
    agent.interrupt(victim=1)
    assert [outcome.code for outcome in world.outcomes()] == [EXIT_AGENT_LOST, -signal.SIGKILL]
    assert agent.memory["step"] == 5


def test_a_send_that_gloo_does_not_fail_costs_no_step(agent, tmp_path):
    world = World(2, recovering.send_much, tmp_path / "c", 5, **environment(agent, 1, victim=1))
    agent.wait_for("step", 2 * 5)
    recovering.until(
        lambda: recovering.queued(world.processes[0].pid) > 1 << 16
    )  # the connection is full, and the send waits
    agent.interrupt(victim=1)
    agent.wait_for("gone")
    world.processes[1].kill()
    assert [outcome.code for outcome in world.outcomes()] == [EXIT_AGENT_LOST, -signal.SIGKILL]
    assert agent.memory["step"] == 5


def test_who_sends_a_state_to_a_rank_that_freezes_does_not_wait_for_it(tmp_path):
    world = World(2, recovering.send_to_a_frozen_rank, tmp_path / "c")
    recovering.until(lambda: not world.processes[0].is_alive())
    world.processes[1].kill()
    sender = world.outcomes()[0]
    assert sender.code == recovering.STUCK or sender.value is True


def test_a_rank_that_is_a_step_behind_catches_up(tmp_path):
    first, second = World(2, recovering.different_steps, tmp_path).values()
    assert first == second
    assert first[:2] == [4, 48]


def test_a_save_that_a_rank_has_not_begun_is_made_up_for_in_the_next_round(tmp_path):
    first, second = World(2, recovering.save_without_a_rank, tmp_path).outcomes()
    assert (first.value, first.error, second.code) == (True, None, -signal.SIGKILL)


def test_an_abort_keeps_connections_of_other_threads(tmp_path):
    assert World(2, recovering.abort_beside_other_connections, tmp_path / "c").values() == [[True, b"open"], [True]]
