"""A device that runs behind the host, and peers that are lost at any of its operations."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.device import Device
from azureml_elastic.distributed.process_groups import abort_gloo, is_peer_error
from azureml_elastic.errors import RoundBroken
from azureml_elastic.train.session.step_checks import OptimizerCopy, UpdateGuard, WeightsWatch
from tests.support.deferred import DeferredDevice, DeferredSGD, Ended
from tests.support.train.fake_agent import InterruptibleAgent

RANKS, STEPS = 3, 4
TIMEOUT_S = 30.0
GLOO_S = 5.0
"""Less: gloo does not fail each collective whose connections are closed. A worker exits where its thread is stuck."""

KINDS = ("keep", "fill", "broadcast", "gradient", "gradient", "reduce", "reduce", "clip", "update", "update")
"""Operations of a step on the device: in this order, the same on all ranks."""

COLLECTIVES = [
    step * len(KINDS) + at for step in range(STEPS) for at, kind in enumerate(KINDS) if kind in ("broadcast", "reduce")
]


@dataclass
class Loss:
    """A lost peer: where its device stops, and where the others are interrupted, by numbers of operations.

    Each of ``interrupts`` is at the first collective without the peer, or before. ``beside`` is whether the device goes
    on while the interruption is received, as it does.
    """

    stops: int
    interrupts: tuple[int, int]
    beside: bool = True


class LosingDevice(DeferredDevice):
    """The device of a rank that is lost, or interrupted."""

    def __init__(self, agent, loss, rank, known):
        self.agent = agent
        self.known = known
        self.stops = None if loss is None or rank != RANKS - 1 else loss.stops
        self.interrupt_at = None if loss is None or rank == RANKS - 1 else loss.interrupts[rank]
        self.beside = loss is not None and loss.beside
        self.receiver = threading.Thread(target=self._interrupt)
        super().__init__()

    def begins(self, number):
        if number == self.stops:
            raise Ended  # its process is dead
        if number == self.interrupt_at:
            self.be_interrupted()

    def waits(self):
        if self.known.is_set():  # the agents tell all
            self.be_interrupted()

    def be_interrupted(self):
        """Receive the agent's message: the flag is set first, then comes the abort."""
        if self.receiver.ident is None:
            self.receiver.start()
            if not self.beside:
                self.receiver.join()

    def _interrupt(self):
        self.agent.interrupted.set()
        self.known.set()
        abort_gloo()
        self.abort()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.second = nn.Parameter(torch.tensor([4.0], dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def values(self):
        return [*self.first.tolist(), *self.second.tolist(), *self.seen.tolist()]


def gradient(parameter, rank, step):
    """Return whole numbers over powers of two, whose sums are exact in any order."""
    return parameter.detach() / 2 + (rank + 1) * (step + 1)


def compute(parameter, target, rank, step):
    target.copy_(gradient(parameter, rank, step))


def clip(gradients):
    for each in gradients:
        each.clamp_(-32, 32)


class Training(threading.Thread):
    """The host of a rank. It counts steps as soon as they are queued."""

    def __init__(self, rank, group, loss, guarded, known):
        super().__init__(daemon=True)
        self.rank, self.group, self.guarded = rank, group, guarded
        agent = InterruptibleAgent()
        self.device = LosingDevice(agent, loss, rank, known)
        self.model = Net()
        self.optimizer = DeferredSGD(self.model.parameters(), self.device, lr=0.25, momentum=0.5)
        self.guard = UpdateGuard(self.device, agent)
        self.guard.enter(RANKS)
        self.guard.attach(TrackedState({"model": self.model, "optimizer": self.optimizer}))
        if guarded:
            self.optimizer.register_step_pre_hook(lambda *_: self.guard.before_update())
        self.steps = 0

    def run(self):
        try:
            for step in range(STEPS):
                self.train(step)
                if self.guarded and not self.guard.step_is_covered():
                    self.guard.wait()
                self.guard.end_step()
                self.steps += 1
        except (RoundBroken, RuntimeError):
            pass

    def train(self, step):
        device, model = self.device, self.model
        self.guard.begin_step()
        if self.rank:
            device.copy([model.seen], [torch.zeros_like(model.seen)])
        else:
            device.copy([model.seen], [torch.full_like(model.seen, step + 1)])
        device.reduce(model.seen, self.group)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            device.queue(partial(compute, parameter, parameter.grad, self.rank, step))
        gradients = [parameter.grad for parameter in model.parameters()]
        for each in gradients:
            device.reduce(each, self.group)
        device.queue(partial(clip, gradients))
        self.optimizer.step()

    def close(self):
        """Let go of the threads."""
        self.device.agent.interrupted.set()
        self.join(TIMEOUT_S)
        self.device.close()
        if self.device.receiver.ident is not None:
            self.device.receiver.join()  # what it aborts must not be another test's

    def result(self):
        """Return what would be handed over."""
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        assert self.device.drain(TIMEOUT_S)
        self.guard.undo_step()
        assert self.device.drain(TIMEOUT_S)
        return self.steps, self.model.values()


def completed_steps():
    """Return the state after each number of steps, as one process computes it."""
    model = Net()
    velocities = [torch.zeros_like(each) for each in model.parameters()]
    states = [model.values()]
    for step in range(STEPS):
        gradients = [sum(gradient(each, rank, step) for rank in range(RANKS)) for each in model.parameters()]
        clip(gradients)
        with torch.no_grad():
            model.seen.fill_(step + 1)
            for parameter, velocity, each in zip(model.parameters(), velocities, gradients, strict=True):
                velocity.mul_(0.5).add_(each)
                parameter.sub_(0.25 * velocity)
        states.append(model.values())
    return states


STATES = completed_steps()


def train(loss, *, guarded=True):
    """Train on three ranks in this process; return the steps and the state of those that are not lost."""
    store = dist.HashStore()
    groups = [None] * RANKS

    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=GLOO_S))

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(RANKS)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    known = threading.Event()
    ranks = [Training(rank, group, loss, guarded, known) for rank, group in enumerate(groups)]
    for each in ranks:
        each.start()
    survivors = ranks if loss is None else ranks[:-1]
    results = [each.result() for each in survivors]
    for each in ranks:
        each.close()
    return results


@st.composite
def losses(draw):
    stops = draw(st.integers(0, COLLECTIVES[-1]))
    impossible = next(number for number in COLLECTIVES if number >= stops)
    interrupts = draw(st.tuples(st.integers(0, impossible), st.integers(0, impossible)))
    return Loss(stops, interrupts, beside=draw(st.booleans()))


def test_without_a_loss_all_steps_are_trained():
    assert train(None) == [(STEPS, STATES[STEPS])] * RANKS


@settings(max_examples=40, deadline=None)
@given(losses())
def test_whatever_is_handed_over_is_the_state_of_a_completed_step(loss):
    for steps, values in train(loss):
        assert values == STATES[steps]


@pytest.mark.parametrize("step", range(1, STEPS))
def test_without_the_guard_an_aborted_collective_is_applied(step):
    at = COLLECTIVES[3 * step + 2]  # its second all-reduce of gradients
    found = train(Loss(at, (at, at)), guarded=False)
    assert all(values != STATES[steps] for steps, values in found), found
    assert all(steps > step for steps, _ in found), "it was counted as complete"
    assert [values for _, values in train(Loss(at, (at, at)))] == [STATES[step]] * 2


class Counting(DeferredDevice):
    """A device that counts how often the host asked where it is."""

    def __init__(self):
        super().__init__()
        self.marks = 0
        self.error = None
        self.captures = False

    def mark(self):
        self.marks += 1
        return super().mark()

    def communicator_error(self):
        return self.error

    def recording(self):
        return self.captures

    def reduce(self, *_, **__):
        """Queue a collective that this rank needs no other one for."""
        self._collectives += 1
        self.queue(lambda: None)


@pytest.fixture
def device():
    made = Counting()
    yield made
    made.close()


@pytest.fixture
def guard(device):
    made = UpdateGuard(device, InterruptibleAgent())
    made.enter(2)
    return made


def test_each_backward_pass_is_waited_for_once(guard, device):
    device.reduce()
    guard.before_update()
    guard.before_update()  # the second of two optimizers
    assert device.marks == 1
    device.reduce()  # a second backward pass, as for the other one of two networks
    guard.before_update()
    assert device.marks == 2
    assert guard.step_is_covered()


def test_a_collective_behind_the_update_uncovers_the_step(guard, device):
    device.reduce()
    guard.before_update()
    device.reduce()  # in a closure of step(), or an average of the weights after it
    assert not guard.step_is_covered()
    guard.wait()
    assert guard.step_is_covered()


def test_an_update_that_was_not_announced_is_waited_for(guard, device, caplog):
    for _ in range(4):  # as if replayed from a graph, in which torch counts no collectives
        assert not guard.step_is_covered()
        guard.wait()
        guard.end_step()
    assert device.marks == 4
    assert len(caplog.records) == 1, "it is said once"


@pytest.mark.parametrize("alone", [True, False], ids=["one process", "a graph is captured"])
def test_what_is_not_waited_for(guard, device, alone):
    device.captures = not alone
    guard.enter(1 if alone else 2)
    device.reduce()
    guard.before_update()
    assert device.marks == 0
    assert guard.step_is_covered() is alone


def test_an_error_of_a_communicator_ends_the_wait_as_a_lost_peer_does(guard, device):
    device.error = "NCCL: the watchdog has found COMM_ERROR"
    device.reduce()
    with pytest.raises(RuntimeError) as caught:
        guard.before_update()
    assert is_peer_error(caught.value)


@pytest.mark.parametrize("scales", [False, True])
def test_the_gradients_are_waited_for_before_a_scaler_sees_them(guard, device, scales):
    tracked = {"model": Net(), **({"scaler": torch.amp.GradScaler("cpu")} if scales else {})}
    guard.attach(TrackedState(tracked))
    device.reduce()
    guard.before_scaler()
    assert device.marks == scales


class Disturbing(torch.optim.SGD):
    """Computes gradients where the weights are, and again beside them."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        super().step()
        with torch.enable_grad():
            return closure()


def copied(optimizer):
    """Return what an update may change, by value."""
    state = copy.deepcopy(optimizer.state_dict())
    return state, [each.detach().clone() for group in optimizer.param_groups for each in group["params"]]


def equal(one, other):
    return all(map(torch.equal, one[1], other[1])) and str(one[0]) == str(other[0])


@pytest.mark.parametrize(
    ("kind", "known"), [(torch.optim.LBFGS, True), (Disturbing, False)], ids=["LBFGS", "of the script"]
)
def test_an_update_that_calls_its_closure_again_is_undone(kind, known):
    """That of another class than ``LBFGS`` from the second step on, in which it is known to do so."""
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    guard = UpdateGuard(Device(torch.device("cpu")), InterruptibleAgent())
    guard.attach(TrackedState({"model": model, "optimizer": optimizer}))
    guard.enter(2)
    optimizer.register_step_pre_hook(lambda each, *_: guard.begin_update(each))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    guard.end_update()
    for _ in range(2):
        before = copied(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.9
        before[0]["param_groups"][0]["lr"] *= 0.9
        optimizer.step(closure)
        assert not equal(before, copied(optimizer))
        assert guard.undo_step() is known
        assert equal(before, copied(optimizer)) is known
        assert not guard.undo_step(), "once"
        guard.expect_repetition(optimizer)
        known = True


def test_what_an_optimizer_has_is_restored_whatever_has_become_of_it():
    """As by modes of its own, which exchange weights and states."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["others"] = [torch.ones(2), {"number": 3}]
    before, kept = copied(optimizer), OptimizerCopy(optimizer, torch.device("cpu"))
    optimizer.state[model.weight]["exp_avg"].fill_(5.0)
    optimizer.state[model.weight]["others"][0].fill_(5.0)
    optimizer.state[model.weight]["others"][1]["number"] = 4
    optimizer.param_groups[0]["lr"] = 0.2
    del optimizer.state[model.bias]
    with torch.no_grad():
        model.weight.zero_()
    kept.restore()
    assert equal(before, copied(optimizer))


@pytest.mark.parametrize("holds", [True, False])
def test_nothing_is_copied_where_nothing_is_handed_over(holds):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    agent = InterruptibleAgent()
    agent.holds_snapshots = holds
    guard = UpdateGuard(Device(torch.device("cpu")), agent)
    guard.enter(1 if holds else 2)
    guard.begin_update(optimizer)
    assert not guard.undo_step()


def test_buffers_of_a_step_that_is_broken_off_are_restored_on_each_device():
    model = nn.BatchNorm1d(3)
    guard = UpdateGuard(Device(torch.device("cpu")), InterruptibleAgent())
    guard.attach(TrackedState({"model": model}))
    guard.enter(2)
    for steps in range(3):
        guard.begin_step()
        model(torch.randn(4, 3))
        assert model.num_batches_tracked == steps + 1
        guard.end_step()
    guard.begin_step()
    model(torch.randn(4, 3))
    assert not guard.undo_step()
    assert model.num_batches_tracked == 3


def watched(policy="stop", **options):
    """Return a model, the average of its weights, and what watches them."""
    model = nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    watch = WeightsWatch(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.attach(TrackedState({"model": model, "average": average, "optimizer": optimizer}, **options))
    return model, average, watch


def test_weights_that_are_exchanged_for_others_are_those_of_no_step(caplog):
    model, average, watch = watched()
    watch.note_weights()
    watch.end_step(1)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 0.9 for name, value in own.items()})
    assert not watch.weights_are_sound()
    assert not watch.weights_are_sound()
    assert len(caplog.records) == 1, "it is said once"
    for parameter, value in zip(model.parameters(), own.values(), strict=True):
        parameter.data.copy_(value)
    assert watch.weights_are_sound(), "they are exchanged back"
    with torch.no_grad():
        model.bias.clamp_(0.0, 0.01)
    watch.note_weights()
    assert watch.weights_are_sound(), "the code that has changed them has ended"
    average.update_parameters(model)
    assert watch.weights_are_sound(), "no optimizer trains the average, which may change later than the step"
    watch.forget_weights()
    model.load_state_dict(own)
    assert watch.weights_are_sound(), "another state is restored"


def test_weights_that_are_not_finite_are_handed_over_if_the_run_goes_on_with_them():
    model, _, watch = watched("warn")
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    watch.end_step(1)
    assert watch.weights_are_sound()
