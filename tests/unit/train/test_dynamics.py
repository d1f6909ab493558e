"""Training at a changing world size: the claims of the study, on a fifth of its samples."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from tests.support.paths import SAMPLES

UNPREPARED, RAMP, RESCALE = "linear, unprepared", "linear, ramp", "linear, rescale"
FIXED = "fixed global batch"

SAMPLES_TRAINED = 72_000

pytestmark = pytest.mark.xdist_group("dynamics")  # outcomes are kept for the other tests


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def study(monkeypatch):
    """The study's module; it imports scikit-learn, which the other processes that collect this test do not need."""
    monkeypatch.syspath_prepend(SAMPLES / "dynamic_sgd")
    return importlib.import_module("study")


@functools.cache
def outcome(study, policy, seeds=10, **setting):
    """Return the outcome of training under a policy, once for all tests."""
    return study.run(study.Setting(**{"samples": SAMPLES_TRAINED, "seeds": seeds, **setting}), study.POLICIES[policy])


def test_a_rise_with_a_ramp_keeps_the_loss_down(study):
    rise, _ = outcome(study, RAMP).changes
    assert rise.peak.mean() <= 1.25
    assert rise.peak.max() <= 1.25


def test_a_rise_without_a_ramp_throws_the_loss_up(study):
    # The rise is after as many samples as with a ramp; what follows when the loss has peaked is left out.
    rise_only = {"samples": SAMPLES_TRAINED * 2 // 3, "worlds": ((0, 1), (1 / 2, 12)), "decays": (3 / 4,)}
    (rise,) = outcome(study, UNPREPARED, **rise_only).changes
    assert rise.peak.mean() > 1.5


def test_with_a_ramp_as_much_is_learnt_as_by_one_worker(study):
    # The loss is a little lower with a fifth of the samples, and a little higher with all of the study's.
    alone = outcome(study, FIXED, worlds=((0, 1),))
    found = study.difference(outcome(study, RAMP), alone, paired=False)
    assert found.mean <= 2 * found.error


def test_a_fall_needs_no_ramp(study):
    found = outcome(study, RAMP)
    assert found.lost == 0
    assert found.changes[1].peak.max() <= 1.2


def test_a_fall_needs_no_ramp_at_the_full_learning_rate(study):
    found = outcome(study, RAMP, decays=())
    fall = found.changes[1]
    assert found.lost == 0
    # A seed's own peak is the noise of one worker's batches, with or without a change.
    assert fall.losses[fall.seen > fall.at].mean(1).max() <= 1.2 * fall.before.mean()


def test_a_fixed_global_batch_learns_the_same_at_any_world_size(study):
    short = {"seeds": 2, "samples": 6_000}
    outcomes = [outcome(study, FIXED, **short), outcome(study, FIXED, **short, worlds=((0, 1),))]
    assert torch.equal(outcomes[0].losses, outcomes[1].losses)


@pytest.mark.parametrize("world_size", [12, 6, 1])
@pytest.mark.parametrize("policy", [RAMP, RESCALE], ids=["ramp", "rescale"])
def test_a_run_that_is_resumed_after_a_rise_goes_on_to_the_bit(study, policy, world_size):
    setting = study.Setting(samples=24_000, seeds=2)
    whole = study.Simulation(setting, study.POLICIES[policy], 1)
    for _ in range(300):
        whole.step()
    whole.enter(12)
    for _ in range(40):
        whole.step()
    assert (1 < whole.rate.factor < 12) == (policy == RAMP)

    resumed = study.Simulation(setting, study.POLICIES[policy], world_size)
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
