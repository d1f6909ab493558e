"""The learning rate of a step: multiplied by the exact factor, and restored after the step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from azureml_elastic import train
from azureml_elastic.checkpoint.state.tracked import unwrap_optimizer
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.config import FixedGlobalBatch, FixedPerWorkerBatch, Ramp
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.position import MicroBatch, Position, Window
from azureml_elastic.train.data.sampling import Cursor, DataSpec
from azureml_elastic.train.optim.learning_rate import LearningRate
from azureml_elastic.train.step_state import StepMachine
from tests.support.train import rates, training, workers
from tests.support.worlds import World

torch.set_num_threads(1)

LINEAR = FixedPerWorkerBatch(scaling="linear")
RATE, K = 0.01, 3
STEPS = 4

HOW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
KINDS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}
WAYS = [
    pytest.param(kind, how, form, id=f"{kind}-{how}-{form}")
    for kind in KINDS
    for how in HOW
    for form in ("float", "tensor")
    if (kind, how, form) != ("adamw", "foreach", "tensor")  # which torch has for capturable optimizers only
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    training.forget_environment(monkeypatch)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def rate_of(form, value=RATE):
    return torch.tensor(value) if form == "tensor" else value


def optimizer_of(model, kind="sgd", how="plain", rate=RATE, **options):
    make, defaults = KINDS[kind]
    return make(model.parameters(), lr=rate, **{**defaults, **HOW[how], **options})


def scaled(optimizer, policy=LINEAR, world_size=K):
    """Return a learning rate that scales an optimizer to a world size."""
    found = LearningRate(policy, Position(WorkerIdentity(0, 0, world_size, 0)), StepMachine())
    found.attach([optimizer])
    found.enter(world_size)
    return found


def gradients(model, step):
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3).sin() + step
    model.zero_grad()
    model(x).square().mean().backward()


def fit(model, optimizer, steps=range(STEPS), after=lambda: None):
    for step in steps:
        gradients(model, step)
        optimizer.step()
        after()
    return workers.flat(model.parameters())


def applied(optimizer):
    """Return a list to which each step appends its rate of the first group."""
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(plain(optimizer.param_groups[0]["lr"])))
    return seen


def plain(value):
    return value.item() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("kind", "how", "form"), WAYS)
def test_a_step_is_exactly_one_at_the_multiplied_rate(kind, how, form):
    weights = {}
    for name, factor, world_size in [("scaled", 1, K), ("reference", K, None), ("control", 1, 1)]:
        model = network()
        optimizer = optimizer_of(model, kind, how, rate_of(form) * factor)
        if world_size is not None:
            scaled(optimizer, world_size=world_size)
        weights[name] = fit(model, optimizer)
    assert torch.equal(weights["scaled"], weights["reference"])
    assert not torch.equal(weights["scaled"], weights["control"])
    untouched = network()
    assert torch.equal(weights["control"], fit(untouched, optimizer_of(untouched, kind, how, rate_of(form))))


@pytest.mark.parametrize(("kind", "how", "form"), WAYS)
def test_between_steps_the_rate_is_the_own_one(kind, how, form):
    model, rate = network(), rate_of(form)
    optimizer = optimizer_of(model, kind, how, rate)
    scaled(optimizer)
    seen, between, saved = applied(optimizer), [], []

    def look():
        between.append(optimizer.param_groups[0]["lr"])
        saved.append(plain(optimizer.state_dict()["param_groups"][0]["lr"]))

    fit(model, optimizer, after=look)
    assert seen == [plain(rate * K)] * STEPS
    assert all(each is rate for each in between)
    assert saved == [plain(rate_of(form))] * STEPS


@pytest.mark.parametrize("form", ["float", "tensor"])
@pytest.mark.parametrize("how", HOW)
def test_groups_keep_rates_of_their_own(how, form):
    weights = []
    for factor in (1, K):
        model = network()
        own = [rate_of(form, value) * factor for value in (0.1, 0.02)]
        optimizer = torch.optim.SGD(
            [{"params": model[at].parameters(), "lr": rate} for at, rate in zip((0, 2), own, strict=True)], **HOW[how]
        )
        if factor == 1:
            scaled(optimizer)
        weights.append(fit(model, optimizer))
        assert [group["lr"] for group in optimizer.param_groups] == own
    assert torch.equal(*weights)


def test_a_tensor_that_groups_share_is_multiplied_once():
    model, rate = network(), torch.tensor(RATE)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=rate, foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    scaled(optimizer)
    seen, reference = applied(optimizer), network()
    assert torch.equal(fit(model, optimizer), fit(reference, optimizer_of(reference, rate=torch.tensor(RATE) * K)))
    assert seen == [(torch.tensor(RATE) * K).item()] * STEPS
    assert rate.item() == torch.tensor(RATE).item()


SCHEDULERS = {
    "cosine": lambda optimizer: lrs.CosineAnnealingLR(optimizer, 10),
    "exponential": lambda optimizer: lrs.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: lrs.LambdaLR(optimizer, lambda step: 0.95**step),
    "one cycle": lambda optimizer: lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "step": lambda optimizer: lrs.StepLR(optimizer, 3),
    "warm-up": lambda optimizer: lrs.SequentialLR(
        optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.CosineAnnealingLR(optimizer, 7)], [3]
    ),
    "chained": lambda optimizer: lrs.ChainedScheduler(
        [lrs.ExponentialLR(optimizer, 0.9), lrs.LinearLR(optimizer, 0.5, total_iters=4)], optimizer=optimizer
    ),
}


@pytest.mark.parametrize("form", ["float", "tensor"])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_see_the_own_rates(name, kind, form):
    curves, steps = {}, {}
    for world_size in (1, K):
        model = network()
        optimizer = optimizer_of(model, kind, rate=rate_of(form))
        scheduler = SCHEDULERS[name](optimizer)
        scaled(optimizer, world_size=world_size)
        steps[world_size], curve = applied(optimizer), []
        for step in range(9):
            fit(model, optimizer, [step])
            scheduler.step()
            curve.append([plain(rate) for rate in scheduler.get_last_lr()])
            assert curve[-1] == [plain(group["lr"]) for group in optimizer.param_groups]
        curves[world_size] = (
            curve,
            {key: value for key, value in optimizer.param_groups[0].items() if key != "params"},
        )
    assert curves[K] == curves[1]
    assert steps[K] == pytest.approx([K * each for each in steps[1]], rel=1e-6)
    assert len(set(steps[1])) > 2


def test_loading_a_state_keeps_the_hooks():
    model, other = network(), network()
    optimizer = optimizer_of(model, "momentum")
    rate = scaled(optimizer)
    trained = optimizer_of(other, "momentum", rate=0.5)
    fit(other, trained, range(2))
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    model.load_state_dict(other.state_dict())
    for group in trained.param_groups:
        group["lr"] = 0.5 * rate.factor
    assert torch.equal(fit(model, optimizer), fit(other, trained))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_that_is_loaded_after_a_failure_is_kept():
    model = network()
    optimizer = optimizer_of(model)
    rate, kept = scaled(optimizer), optimizer.state_dict()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.load_state_dict(kept)
    rate.begin()
    assert optimizer.param_groups[0]["lr"] == RATE


def test_a_deep_copy_has_no_hooks_and_leaves_those_of_the_original():
    model = network()
    optimizer = optimizer_of(model, "momentum")
    scaled(optimizer)
    fit(model, optimizer, range(2))
    other = copy.deepcopy(optimizer)
    unscaled, still_scaled = applied(other), applied(optimizer)
    fit(model, optimizer, range(2))
    other.step()
    assert unscaled == [RATE]
    assert still_scaled == [RATE * K] * 2
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == RATE


def failed(form="float", **options):
    """Return the error of a step whose closure fails."""
    model = network()
    optimizer = optimizer_of(model, rate=rate_of(form), **options)
    rate = scaled(optimizer)
    gradients(model, 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert plain(optimizer.param_groups[0]["lr"]) == plain(rate_of(form) * K)  # torch calls no hook after a failure
    return model, optimizer, rate


@pytest.mark.parametrize("form", ["float", "tensor"])
def test_a_closure_that_fails_leaves_nothing_behind(form):
    model, optimizer, rate = failed(form)
    rate.begin()
    assert plain(optimizer.param_groups[0]["lr"]) == plain(rate_of(form))
    rate.begin()
    assert plain(optimizer.param_groups[0]["lr"]) == plain(rate_of(form))
    assert torch.equal(workers.flat(model.parameters()), workers.flat(network().parameters()))


@pytest.mark.parametrize("form", ["float", "tensor"])
def test_the_step_after_a_closure_that_fails_is_scaled_once(form):
    model, optimizer, _ = failed(form)
    seen, reference = applied(optimizer), network()
    assert torch.equal(fit(model, optimizer), fit(reference, optimizer_of(reference, rate=rate_of(form) * K)))
    assert seen == [plain(rate_of(form) * K)] * STEPS
    assert plain(optimizer.param_groups[0]["lr"]) == plain(rate_of(form))


CHANGES = {
    "a new number": ("float", lambda group: group.update(lr=0.5), 0.5),
    "a new tensor": ("tensor", lambda group: group.update(lr=torch.tensor(0.5)), 0.5),
    "filled": ("tensor", lambda group: group["lr"].fill_(0.5), 0.5),
    "a tensor for a number": ("float", lambda group: group.update(lr=torch.tensor(0.5)), 0.5),
    "a number for a tensor": ("tensor", lambda group: group.update(lr=0.5), 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_rate_that_is_set_after_a_closure_that_fails_is_kept(change):
    form, act, value = CHANGES[change]
    model, optimizer, _ = failed(form)
    act(optimizer.param_groups[0])
    seen = applied(optimizer)
    fit(model, optimizer, range(2))
    assert seen == [value * K] * 2
    assert plain(optimizer.param_groups[0]["lr"]) == value


def test_a_scheduler_that_steps_after_a_failing_closure_is_noticed():
    model = network()
    optimizer = optimizer_of(model)
    scheduler = lrs.LambdaLR(optimizer, lambda step: 0.5**step)
    rate = scaled(optimizer)
    fit(model, optimizer, [0])
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    scheduler.step()
    rate.begin()
    assert optimizer.param_groups[0]["lr"] == RATE / 2


def test_lbfgs_is_scaled_with_its_closure():
    weights = []
    for factor in (1, K):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=RATE * factor, max_iter=4)
        if factor == 1:
            scaled(optimizer)
        for step in range(STEPS):

            def closure(model=model, step=step):
                gradients(model, step)
                return model(torch.ones(1, 3).double()).sum()

            optimizer.step(closure)
            assert optimizer.param_groups[0]["lr"] == RATE * factor
        weights.append(workers.flat(model.parameters()))
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], workers.flat(network().parameters()))


@pytest.mark.parametrize(("how", "fires"), [("plain", False), ("foreach", False), ("fused", True)])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_step_that_the_grad_scaler_skips_changes_nothing(kind, how, fires):
    model = network().float()
    optimizer = optimizer_of(model, kind, how)
    scaled(optimizer)
    seen, scaler = applied(optimizer), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for overflow in (1.0, math.inf, 1.0):
        before = workers.flat(model.parameters())
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().mean() * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, workers.flat(model.parameters())) == (overflow > 1)
        assert optimizer.param_groups[0]["lr"] == RATE
    assert seen == [RATE * K] * (3 if fires else 2)


def buffers(optimizer):
    return workers.flat(state["momentum_buffer"] for state in optimizer.state.values())


@pytest.mark.parametrize("how", HOW)
def test_momentum_is_divided_once_and_only_where_the_factor_rises(how):
    policy = FixedPerWorkerBatch(scaling="linear", momentum="rescale")
    model = network()
    optimizer = optimizer_of(model, "momentum", how)
    rate = scaled(optimizer, policy, world_size=1)
    fit(model, optimizer, range(2))
    for world_size, divisor in [(2, 2), (2, 1), (8, 4), (1, 1), (3, 3)]:
        before = buffers(optimizer)
        rate.enter(world_size)
        assert rate.factor == world_size
        assert torch.equal(buffers(optimizer), before * (1 / divisor))
        fit(model, optimizer, [2])


def test_divided_momentum_moves_the_weights_as_before():
    moved = []
    for world_size in (1, 4):
        model = network()
        optimizer = optimizer_of(model, "momentum")
        rate = scaled(optimizer, FixedPerWorkerBatch(scaling="linear", momentum="rescale"), world_size=1)
        before = fit(model, optimizer, range(3))
        rate.enter(world_size)
        for parameter in model.parameters():
            parameter.grad.zero_()
        optimizer.step()
        moved.append(workers.flat(model.parameters()) - before)
    assert torch.equal(*moved)
    assert moved[0].abs().sum() > 0


def test_momentum_that_was_divided_before_a_restart_is_not_divided_again():
    policy = FixedPerWorkerBatch(scaling="linear", momentum="rescale")
    model = network()
    optimizer = optimizer_of(model, "momentum")
    first = scaled(optimizer, policy, world_size=1)
    fit(model, optimizer, range(2))
    first.enter(4)
    saved, state, kept = first.to_json(), optimizer.state_dict(), buffers(optimizer)
    for world_size, divisor in [(4, 1), (8, 2)]:
        again = optimizer_of(network(), "momentum")
        again.load_state_dict(copy.deepcopy(state))
        rate = LearningRate(policy, Position(WorkerIdentity(0, 0, world_size, 0)), StepMachine())
        rate.attach([again])
        rate.load(saved)
        rate.enter(world_size)
        assert torch.equal(buffers(again), kept / divisor)


@pytest.mark.parametrize("momentum", [Ramp(), "none"])
def test_momentum_is_left_alone_otherwise(momentum):
    model = network()
    optimizer = optimizer_of(model, "momentum")
    rate = scaled(optimizer, FixedPerWorkerBatch(scaling="linear", momentum=momentum), world_size=1)
    fit(model, optimizer, range(2))
    before = buffers(optimizer)
    rate.enter(4)
    assert torch.equal(buffers(optimizer), before)
    assert rate.factor == (1 if isinstance(momentum, Ramp) else 4)


@pytest.mark.parametrize(("kind", "steps"), [("sgd", 0), ("momentum", 16), ("adamw", 16)])
def test_a_ramp_is_as_long_as_the_momentum_of_the_optimizer_asks_for(kind, steps):
    model = network()
    optimizer = optimizer_of(model, kind)
    rate, seen = scaled(optimizer, world_size=1), applied(optimizer)
    rate.enter(2)
    fit(model, optimizer, range(steps + 2), lambda: rate.commit(None))
    assert seen == pytest.approx([RATE * (1 + step / steps) for step in range(steps)] + [RATE * 2] * 2)


def test_a_ramp_counts_steps_of_the_run_not_of_an_optimizer():
    model = network()
    first, second = (torch.optim.SGD(model[at].parameters(), lr=RATE, momentum=0.9) for at in (0, 2))
    rate = LearningRate(
        FixedPerWorkerBatch(scaling="linear", momentum=Ramp(steps=4)),
        Position(WorkerIdentity(0, 0, 1, 0)),
        StepMachine(),
    )
    rate.attach([first, second])
    rate.enter(1)
    rate.enter(5)
    seen = applied(first), applied(second)
    for step in range(5):
        gradients(model, step)
        for _ in range(step):  # none at all under a GradScaler, for example
            first.step()
        second.step()
        rate.commit(None)
    assert seen[0] == [RATE * factor for factor in (2, 3, 3, 4, 4, 4, 5, 5, 5, 5)]
    assert seen[1] == [RATE * factor for factor in (1, 2, 3, 4, 5)]


def test_what_an_optimizer_does_not_have_cannot_be_scaled(tmp_path):
    model, policy = network(), FixedPerWorkerBatch(scaling="linear", momentum="rescale")
    refused = pytest.raises(UsageError, match="buffers of SGD, which AdamW has not")
    with train.start(workers.policy(tmp_path), batch=policy) as run, refused:
        run.track(model=model, optimizer=optimizer_of(model, "adamw"))


def test_adascale_and_a_grad_scaler_do_not_go_together(tmp_path):
    model, policy = network(), FixedPerWorkerBatch(scaling="adascale")
    scaler = torch.amp.GradScaler("cpu")
    with (
        train.start(workers.policy(tmp_path), batch=policy) as run,
        pytest.raises(UsageError, match="Train in bfloat16"),
    ):
        run.track(model=model, optimizer=optimizer_of(model), scaler=scaler)


def test_a_batch_that_the_reference_cannot_deal_out_is_refused(tmp_path):
    policy = FixedPerWorkerBatch(scaling="linear", reference_world_size=4)
    text = "global_batch_size=10 cannot be divided by reference_world_size=4"
    with train.start(workers.policy(tmp_path), batch=policy) as run, pytest.raises(UsageError, match=text):
        run.loader(workers.dataset(), global_batch_size=10)


@pytest.mark.parametrize("policy", [FixedGlobalBatch(), LINEAR])
def test_an_optimizer_step_in_the_middle_of_accumulation_is_refused(policy, tmp_path):
    with train.start(workers.policy(tmp_path), batch=policy) as run:
        model = run.wrap(workers.network())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        before, accumulated = workers.flat(model.parameters()), []
        for x, y in run.loader(workers.dataset(10), global_batch_size=10, micro_batch_size=4):
            run.backward(nn.functional.cross_entropy(model(x), y))
            accumulated.append(run.accumulating)
            if run.accumulating:
                with pytest.raises(UsageError, match=r"Write `if run\.accumulating: continue`"):
                    optimizer.step()
                assert torch.equal(workers.flat(model.parameters()), before)
                assert not optimizer.state
                assert optimizer.param_groups[0]["lr"] == RATE
                continue
            optimizer.step()
            run.commit()
        assert accumulated == [True, True, False]
        assert run.steps == 1
        assert not torch.equal(workers.flat(model.parameters()), before)


def accumulating(optimizer, steps=None):
    """Scale an optimizer in the middle of an accumulation."""
    position = Position(WorkerIdentity(0, 0, K, 0))
    rate = LearningRate(LINEAR, position, steps or StepMachine())
    rate.attach([optimizer])
    rate.enter(K)
    stream = position.add("train", DataSpec(10, global_batch_size=10, seed=0, shuffle=True, drop_last=False))
    window = Window(tuple(range(10)), 10, Cursor(), Cursor(0, 10), 10)
    position.take(stream, MicroBatch(window, samples=4, weight=0.4, last=False))


def test_a_step_that_counts_for_nothing_is_not_refused():
    steps, model = StepMachine(), network()
    optimizer = optimizer_of(model)
    accumulating(optimizer, steps)
    with pytest.raises(UsageError, match="accumulating"):
        optimizer.step()
    steps.discard()
    optimizer.step()


@pytest.mark.parametrize("form", ["float", "tensor"])
@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_the_state_can_be_looked_at_in_the_middle_of_accumulation(kind, form):
    model = network()
    optimizer = optimizer_of(model, kind, rate=rate_of(form))
    state = TrackedState({"model": model, "optimizer": optimizer})
    accumulating(optimizer)
    seen = applied(optimizer)
    state.collect(is_main=True)
    assert not seen, "an optimizer without a state is not made to step"
    assert plain(optimizer.param_groups[0]["lr"]) == plain(rate_of(form))
    assert torch.equal(workers.flat(model.parameters()), workers.flat(network().parameters()))


def test_under_a_fixed_global_batch_nothing_is_multiplied(tmp_path):
    with train.start(workers.policy(tmp_path)) as run:
        model = run.wrap(workers.network())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        run.track(model=model, optimizer=optimizer)
        seen = applied(optimizer)
        for x, y in run.loader(workers.dataset(), global_batch_size=10):
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            run.commit()
            assert run.learning_rate_factor == 1
    assert seen == [RATE] * 5


def test_accelerates_optimizer_is_unwrapped(accelerator, tmp_path):
    model, reference = network(), network()
    optimizer = optimizer_of(model, "momentum")
    wrapped = accelerator.prepare(optimizer)
    assert type(wrapped).__name__ == "AcceleratedOptimizer"
    assert unwrap_optimizer(wrapped) is unwrap_optimizer(optimizer) is optimizer
    state = TrackedState({"model": model, "optimizer": wrapped})
    assert state.optimizers == [optimizer]
    rate = LearningRate(LINEAR, Position(WorkerIdentity(0, 0, K, 0)), StepMachine())
    rate.attach(state.optimizers)
    rate.enter(K)
    expected = fit(reference, optimizer_of(reference, "momentum", rate=RATE * K))
    assert torch.equal(fit(model, wrapped), expected)
    assert wrapped.param_groups[0]["lr"] == RATE


def test_accelerates_optimizer_comes_back_from_a_checkpoint(accelerator, tmp_path):
    def start():
        run = train.start(workers.policy(tmp_path), batch=LINEAR)
        model = workers.network()
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
        run.track(model=model, optimizer=optimizer)
        return run, model, optimizer

    run, model, optimizer = start()
    with run:
        for x, y in run.loader(workers.dataset(), global_batch_size=10):
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            run.commit()
    again, _, restored = start()
    with again:
        assert again.steps == 5
        assert torch.equal(buffers(restored), buffers(optimizer))


@pytest.mark.shards_on_cpus
def test_ranks_with_shards_of_optimizer_and_model_scale_alike():
    for found in World(2, rates.step_in_shards).values():
        assert found == {"zero": [True, RATE, False], "fsdp2": [True, RATE, False], "ddp": [True, RATE, False]}


@pytest.mark.shards_on_cpus
def test_momentum_of_shards_is_divided_too():
    for found in World(2, rates.rescale_in_shards).values():
        assert found == {"zero": True, "fsdp2": True, "ddp": True}


def test_adascale_needs_the_whole_model_on_each_rank(tmp_path):
    for said in World(2, rates.refused_in_shards, tmp_path, FixedPerWorkerBatch(scaling="adascale")).values():
        assert "needs the whole model on each rank" in said


def test_a_ramp_goes_on_over_restarts_at_other_world_sizes(tmp_path):
    policy = FixedPerWorkerBatch(scaling="linear", momentum=Ramp(steps=4))
    factors = []
    for size, until in [(1, 2), (3, 5), (3, 6), (2, 8)]:
        values = World(size, rates.fit, tmp_path, until, policy).values()
        for found in values:
            assert found["weights"] == values[0]["weights"]
            assert found["applied"] == [RATE * factor for factor in values[0]["factors"]]
            assert found["between"] == {RATE}
        factors.append(values[0]["factors"])
    assert factors == [[1, 1], [1, 1.5, 2], [2.5], [2, 2]]


def test_a_run_that_takes_another_policy_goes_on_from_a_factor_of_one(tmp_path):
    first, second = FixedPerWorkerBatch(scaling="linear", momentum=Ramp(steps=4)), FixedGlobalBatch()
    factors = []
    for size, until, policy in [(1, 2, second), (2, 4, first), (2, 5, second), (1, 6, first)]:
        factors.append(World(size, rates.fit, tmp_path, until, policy).values()[0]["factors"])
    assert factors == [[1, 1], [1, 1.25], [1], [1]]


def test_adascale_measures_the_noise_of_all_micro_batches(tmp_path):
    policy = FixedPerWorkerBatch(scaling="adascale")
    for found in World(2, rates.measure, tmp_path, policy).values():
        assert len(found["gains"]) == 4
        assert found["gains"] == pytest.approx(found["expected"], rel=1e-9)
        assert found["applied"] == [RATE * gain for gain in found["gains"]]
        assert all(1 < gain < 2 for gain in found["gains"])
