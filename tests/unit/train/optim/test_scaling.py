"""The factor of the learning rate as pure functions: ramps, targets, and the gradient noise scale."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from azureml_elastic.config import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch, Ramp
from azureml_elastic.train.optim.learning_rate import GradientNoiseScale, Scale, ramp_steps, target

SIZES = st.integers(1, 48)
MOMENTA = st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.99])
RAMPS = st.builds(Ramp, steps=st.just("auto") | st.integers(0, 40))
LIMITS = st.none() | st.floats(1, 20)
MOMENTS = st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-3, 1)) | st.just(())


def policies(scaling=("linear", "sqrt", "adascale", "none"), momentum=RAMPS, limits=LIMITS):
    return st.builds(
        FixedPerWorkerBatch,
        scaling=st.sampled_from(scaling),
        reference_world_size=st.integers(1, 4),
        momentum=momentum,
        max_scale=limits,
    )


# The rounds of a run: world size and number of steps.
LIVES = st.lists(st.tuples(SIZES, st.integers(0, 30)), min_size=1, max_size=8)


def rising(policy, before, after, momentum):
    """Return the factor before a change, and the state after it; only changes that raise the factor are kept."""
    scale = Scale(before)
    now, (entered, _) = scale.factor(policy), scale.enter(policy, after, momentum)
    assume(target(policy, after, entered.noise) > now)
    return now, entered


@given(policies(["linear", "sqrt"]), SIZES, SIZES, MOMENTA)
def test_a_ramp_goes_linearly_from_the_factor_that_is_applied_to_the_one_asked_for(policy, before, after, momentum):
    now, scale = rising(policy, before, after, momentum)
    wanted = target(policy, after)
    assert scale.steps == ramp_steps(policy.momentum, wanted / now, momentum)
    factors = [scale.factor(policy)]
    for _ in range(scale.steps):
        scale = scale.advance()
        factors.append(scale.factor(policy))
    assert factors[0] == (now if len(factors) > 1 else wanted)
    assert factors == sorted(factors)
    assert factors[-1] == wanted
    assert factors == pytest.approx(np.linspace(factors[0], wanted, len(factors)).tolist(), rel=1e-12)
    assert scale.advance().factor(policy) == wanted


@given(policies(["linear", "sqrt"], RAMPS | st.sampled_from(["rescale", "none"])), SIZES, SIZES, MOMENTA)
def test_a_factor_falls_at_once(policy, before, after, momentum):
    scale = Scale(before)
    assume(target(policy, after) < scale.factor(policy))
    entered, shrink = scale.enter(policy, after, momentum)
    assert entered.factor(policy) == target(policy, after)
    assert entered.steps == 0
    assert shrink == 1.0


@given(st.integers(1, 48), st.integers(1, 48), st.integers(1, 999))
@example(12, 1, 900)
@example(3, 2, 950)
def test_the_steps_of_a_ramp_are_those_of_exact_arithmetic(after, before, thousandths):
    """It takes as long as the momentum remembers."""
    exact = Fraction(8, 10) * Fraction(after, before) / (1 - Fraction(thousandths, 1000))
    assert ramp_steps(Ramp(), after / before, thousandths / 1000) == math.ceil(exact)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_without_a_momentum_that_forgets_nothing_is_waited_for(momentum):
    assert ramp_steps(Ramp(), 12, momentum) == 0
    assert ramp_steps(Ramp(steps=7), 12, momentum) == 7


@given(policies(["linear", "sqrt", "adascale"], limits=st.floats(1, 20)), LIVES, MOMENTA, st.lists(MOMENTS, min_size=1))
def test_no_factor_is_above_the_limit(policy, lives, momentum, moments):
    scale = Scale(lives[0][0], noise=GradientNoiseScale(moments[0]))
    for number, (size, steps) in enumerate(lives):
        scale, _ = scale.enter(policy, size, momentum)
        scale = replace(scale, noise=GradientNoiseScale(moments[number % len(moments)]))
        for _ in range(steps):
            assert scale.factor(policy) <= policy.max_scale
            scale = scale.advance()


@pytest.mark.parametrize(
    ("scaling", "limit", "factors"),
    [
        ("linear", None, [0.5, 1, 1.5, 6]),
        ("linear", 2, [0.5, 1, 1.5, 2]),
        ("sqrt", None, [math.sqrt(0.5), 1, math.sqrt(1.5), math.sqrt(6)]),
        ("none", 2, [1, 1, 1, 1]),
    ],
)
def test_factors_are_of_the_ratio_to_the_reference(scaling, limit, factors):
    policy = FixedPerWorkerBatch(scaling=scaling, reference_world_size=2, max_scale=limit)
    assert [target(policy, size) for size in (1, 2, 3, 12)] == factors


@given(policies(momentum=RAMPS | st.sampled_from(["rescale", "none"])), LIVES, MOMENTA, MOMENTS)
def test_every_point_of_a_history_comes_back_from_json(policy, lives, momentum, moments):
    scale = Scale(lives[0][0], noise=GradientNoiseScale(moments))
    for size, steps in lives:
        scale, _ = scale.enter(policy, size, momentum)
        for _ in range(steps):
            scale = scale.advance()
            again = Scale.from_json(json.loads(json.dumps(scale.to_json())))
            assert again == scale
            assert again.factor(policy) == scale.factor(policy)
            assert again.enter(policy, size + 1, momentum) == scale.enter(policy, size + 1, momentum)


@given(policies(momentum=st.just(Ramp()) | st.builds(Ramp, steps=st.integers(1, 40))), LIVES, st.just(0.9), MOMENTS)
def test_a_change_in_the_middle_of_a_ramp_goes_on_from_the_applied_factor(policy, lives, momentum, moments):
    scale = Scale(lives[0][0], noise=GradientNoiseScale(moments))
    for size, steps in lives:
        now = scale.factor(policy)
        scale, shrink = scale.enter(policy, size, momentum)
        assert shrink == 1.0
        assert scale.factor(policy) == min(now, target(policy, size, scale.noise))
        for _ in range(steps):
            scale = scale.advance()


def test_a_ramp_that_is_interrupted_twice():
    policy = FixedPerWorkerBatch(scaling="linear", momentum=Ramp(steps=4))
    scale, factors = Scale(1), []
    for size, steps in [(1, 1), (3, 2), (5, 2), (4, 3), (2, 1), (2, 1)]:
        scale, _ = scale.enter(policy, size, 0.9)
        for _ in range(steps):
            factors.append(scale.factor(policy))
            scale = scale.advance()
    assert factors == [1, 1, 1.5, 2, 2.75, 3.5, 3.625, 3.75, 2, 2]


@given(policies(["linear", "sqrt"], st.just("rescale")), LIVES, MOMENTA)
def test_rescaled_momentum_is_applied_as_before(policy, lives, momentum):
    scale = Scale(lives[0][0])
    for size, _ in lives:
        now = scale.factor(policy)
        scale, shrink = scale.enter(policy, size, momentum)
        if target(policy, size) > now:
            assert scale.factor(policy) * shrink == pytest.approx(now, rel=1e-12)
        else:
            assert shrink == 1.0


def test_without_compensation_a_factor_rises_at_once():
    scale, shrink = Scale(1).enter(FixedPerWorkerBatch(scaling="linear", momentum="none"), 4, 0.9)
    assert (scale.factor(FixedPerWorkerBatch(scaling="linear", momentum="none")), shrink) == (4, 1.0)


@given(MOMENTS, st.integers(1, 8), SIZES)
@example((2.524234954175899, 0.0, 1.0), 4, 7)
def test_a_gain_is_between_one_and_the_ratio_of_the_batches(moments, reference, size):
    gain, k = GradientNoiseScale(moments).gain(reference, size), size / reference
    assert min(1, k) <= gain <= max(1, k)
    if k <= 1:
        assert gain == k


@pytest.mark.parametrize(
    ("moments", "gain"), [((1.0, 0.0, 1.0), 8), ((0.0, 1e9, 1.0), 1), ((0.0, 0.0, 1.0), 8), ((2.0, 2.0, 0.5), 16 / 9)]
)
def test_the_gain_is_all_of_the_batch_for_noise_alone_and_nothing_without(moments, gain):
    assert GradientNoiseScale(moments).gain(1, 8) == pytest.approx(gain, rel=1e-6)


def test_before_anything_is_measured_a_larger_batch_gains_nothing():
    assert GradientNoiseScale().gain(2, 8) == 1.0


def micro_batches(generator, sizes, mean, deviations):
    """Return the mean gradients of micro-batches of samples with that mean, and deviations by coordinate."""
    return [mean + generator.normal(size=(size, mean.size)).mean(axis=0) * deviations for size in sizes]


def squares(sizes, gradients):
    """Return the arguments of :meth:`GradientNoiseScale.observe`."""
    shares = np.array(sizes) / sum(sizes)
    total = sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
    local = sum(share * gradient @ gradient for share, gradient in zip(shares, gradients, strict=True))
    return float(local), float(total @ total)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=1, max_size=6),
    st.integers(1, 16),
    st.integers(0, 2**32 - 1),
)
def test_estimates_are_those_of_brute_force(steps, reference, seed):
    generator = np.random.default_rng(seed)
    noise, weighted, weights = GradientNoiseScale(), np.zeros(2), 0.0
    for sizes in steps:
        gradients = generator.normal(size=(len(sizes), 7))
        mean = np.average(gradients, axis=0, weights=sizes)
        deviations = sum(size * (each - mean) @ (each - mean) for size, each in zip(sizes, gradients, strict=True))
        variance = deviations / (len(sizes) - 1)
        squared = max(mean @ mean - variance / sum(sizes), 0)
        new = len(sizes) / 1000
        weighted = weighted * (1 - new) + new * np.array([variance / reference, squared])
        weights = weights * (1 - new) + new
        local, total = squares(sizes, gradients)
        noise = noise.observe(local, total, micro_batches=len(sizes), count=sum(sizes), reference=reference)
    assert noise.moments == pytest.approx((*weighted, weights), rel=1e-9, abs=1e-12)
    v, m = (each / weights for each in weighted)
    assert noise.gain(1, 3) == pytest.approx((max(v, 1e-6) + m) / (max(v, 1e-6) / 3 + m), rel=1e-6)


def test_estimates_are_right_on_the_mean_for_uneven_micro_batches():
    generator = np.random.default_rng(0)
    mean = generator.normal(size=60)
    deviations = generator.uniform(0.5, 2.0, size=60)
    sizes, reference = [1, 2, 5, 8], 4
    observed = []
    for _ in range(4000):
        local, total = squares(sizes, micro_batches(generator, sizes, mean, deviations))
        noise = GradientNoiseScale().observe(local, total, micro_batches=4, count=16, reference=reference)
        variance, squared, weight = noise.moments
        observed.append((variance / weight * reference, squared / weight))
    truth = np.array([deviations @ deviations, mean @ mean])
    error = np.std(observed, axis=0) / math.sqrt(len(observed))
    assert (np.abs(np.mean(observed, axis=0) - truth) < 4 * error).all()
    assert (error < 0.01 * truth).all()


@pytest.mark.parametrize(
    ("local", "mean", "count"), [(1.0, 1.0, 1), (math.inf, 1.0, 2), (math.nan, math.nan, 2), (1.0, math.inf, 3)]
)
def test_nothing_is_learnt_from_one_micro_batch_or_gradients_that_overflow(local, mean, count):
    before = GradientNoiseScale((1.0, 2.0, 0.5))
    assert before.observe(local, mean, micro_batches=count, count=8, reference=4) == before


@given(st.integers(2, 3000), st.floats(0, 10), st.floats(0, 10))
def test_more_micro_batches_forget_more(number, local, mean):
    before = GradientNoiseScale((1.0, 2.0, 0.5))
    _, _, weight = before.observe(local, mean, micro_batches=number, count=number, reference=4).moments
    assert weight == pytest.approx(1 - 0.5 * max(0, 1 - number / 1000))


def test_the_gain_of_a_larger_batch_is_known_before_its_first_step():
    policy = FixedPerWorkerBatch(scaling="adascale", momentum="none")
    noise = GradientNoiseScale((3.0, 1.0, 1.0))
    scale, _ = Scale(2, noise=noise).enter(policy, 4, 0.9)
    assert scale.factor(policy) == noise.gain(1, 4) == 4 / 1.75


POLICY = TypeAdapter(BatchPolicy)


@given(policies(momentum=RAMPS | st.sampled_from(["rescale", "none"])) | st.builds(FixedGlobalBatch))
def test_a_policy_comes_back_from_json(policy):
    assert POLICY.validate_json(POLICY.dump_json(policy)) == policy


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "scaling"),
        ({"scaling": "cube"}, "'linear', 'sqrt', 'adascale' or 'none'"),
        ({"scaling": "linear", "reference_world_size": 0}, "greater than or equal to 1"),
        ({"scaling": "linear", "max_scale": 0.5}, "greater than or equal to 1"),
        ({"scaling": "linear", "momentum": "half"}, "rescale"),
        ({"scaling": "linear", "momentum": {"steps": -1}}, "steps=-1 is below the limit of 0"),
        ({"scaling": "linear", "warmup": 3}, "warmup"),
    ],
)
def test_what_a_policy_cannot_be_is_explained(fields, text):
    with pytest.raises(ValidationError, match=text):
        FixedPerWorkerBatch(**fields)
