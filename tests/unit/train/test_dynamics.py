"""Training at a changing world size: the claims of the study, on a third of its samples."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from tests.support.paths import SAMPLES

sys.path.insert(0, str(SAMPLES / "dynamic_sgd"))
from study import POLICIES, Setting, Simulation, difference, run

UNPREPARED, RAMP, RESCALE = POLICIES["linear, unprepared"], POLICIES["linear, ramp"], POLICIES["linear, rescale"]
FIXED = POLICIES["fixed global batch"]

SETTING = Setting(samples=120_000, seeds=10)


pytestmark = pytest.mark.xdist_group("dynamics")  # outcomes are kept for the other tests


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


cached = lru_cache(run)


def test_a_rise_with_a_ramp_keeps_the_loss_down():
    rise, _ = cached(SETTING, RAMP).changes
    assert rise.peak.mean() <= 1.25
    assert rise.peak.max() <= 1.25


def test_a_rise_without_a_ramp_throws_the_loss_up():
    rise, _ = cached(SETTING, UNPREPARED).changes
    assert rise.peak.mean() > 1.5


def test_with_a_ramp_as_much_is_learnt_as_by_one_worker():
    # The loss is a little lower with a third of the samples, and a little higher with all of the study's.
    alone = cached(replace(SETTING, worlds=((0, 1),)), FIXED)
    found = difference(cached(SETTING, RAMP), alone, paired=False)
    assert found.mean <= 2 * found.error


def test_a_fall_needs_no_ramp():
    outcome = cached(SETTING, RAMP)
    assert outcome.lost == 0
    assert outcome.changes[1].peak.max() <= 1.2


def test_a_fall_needs_no_ramp_at_the_full_learning_rate():
    outcome = run(Setting(samples=72_000, decays=()), RAMP)
    fall = outcome.changes[1]
    assert outcome.lost == 0
    # A seed's own peak is the noise of one worker's batches, with or without a change.
    assert fall.losses[fall.seen > fall.at].mean(1).max() <= 1.2 * fall.before.mean()


def test_a_fixed_global_batch_learns_the_same_at_any_world_size():
    setting = Setting(samples=6_000, seeds=2)
    outcomes = [run(replace(setting, worlds=worlds), FIXED) for worlds in (setting.worlds, ((0, 1),))]
    assert torch.equal(outcomes[0].losses, outcomes[1].losses)


@pytest.mark.parametrize("world_size", [12, 6, 1])
@pytest.mark.parametrize("policy", [RAMP, RESCALE], ids=["ramp", "rescale"])
def test_a_run_that_is_resumed_after_a_rise_goes_on_to_the_bit(policy, world_size):
    setting = Setting(samples=24_000, seeds=2)
    whole = Simulation(setting, policy, 1)
    for _ in range(300):
        whole.step()
    whole.enter(12)
    for _ in range(40):
        whole.step()
    assert (1 < whole.rate.factor < 12) == (policy is RAMP)

    resumed = Simulation(setting, policy, world_size)
    resumed.load(*whole.save())
    if world_size != 12:
        whole.enter(world_size)
    for _ in range(60):
        assert resumed.rate.factor == whole.rate.factor
        whole.step()
        resumed.step()
    (document, tensors), (others, other_tensors) = whole.save(), resumed.save()
    assert document == others
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())
