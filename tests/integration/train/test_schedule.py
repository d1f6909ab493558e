"""Schedules that count samples: the same learning rates for the same samples at any world size."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

from azureml_elastic import train
from azureml_elastic.config import FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.loader import LoaderContext
from azureml_elastic.train.data.map_loader import MapLoader
from azureml_elastic.train.data.position import Batching, Position
from azureml_elastic.train.data.sampling import Cursor, DataSpec
from azureml_elastic.train.optim.learning_rate import LearningRate, Schedule
from azureml_elastic.train.step_state import StepMachine
from tests.support.train import rates, training, workers
from tests.support.worlds import World

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("alone")

PER_WORKER = FixedPerWorkerBatch(scaling="linear", momentum="none")
REFERENCE_2 = FixedPerWorkerBatch(scaling="linear", momentum="none", reference_world_size=2)


def ends(spec):
    """Return the samples after each step of an epoch at the reference world size."""
    return [*range(spec.global_batch_size, spec.usable, spec.global_batch_size), spec.usable]


class Walk:
    """The steps of a run, without training."""

    def __init__(self, spec, policy):
        self.spec = spec
        self.policy = policy
        self.position = Position(WorkerIdentity(0, 0, 1, 0))
        self.stream = self.position.add("train", spec)
        self.rate = LearningRate(policy, self.position, StepMachine())
        self.due = None

    def live(self, world_size, steps):
        """Yield for each step of a round its window and the steps of a schedule that it replaces."""
        self.position.enter(WorkerIdentity(0, 0, world_size, 0))
        self.rate.load(json.loads(json.dumps(self.rate.to_json())))
        self.rate.enter(world_size)
        context = LoaderContext(self.position, torch.device("cpu"), Batching(self.policy))
        loader = MapLoader(range(self.spec.length), self.stream, context)
        while steps:
            for micro, _ in loader.planned():
                self.position.take(self.stream, micro)
                self.due = self.rate.steps_of(micro.window)
                yield micro.window
                self.due = None
                self.position.commit()
                self.rate.commit(micro.window)
                steps -= 1
                if not steps:
                    return
            self.stream.cursor = Cursor(self.stream.cursor.epoch + 1)


SPECS = st.tuples(st.integers(1, 8), st.booleans()).flatmap(
    lambda drawn: st.builds(
        DataSpec,
        length=st.integers(12 * drawn[0] if drawn[1] else 1, 120),  # one step of six ranks or more with drop_last
        global_batch_size=st.just(2 * drawn[0]),
        seed=st.just(0),
        shuffle=st.just(value=False),
        drop_last=st.just(drawn[1]),
    )
)
LIVES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=6)


@given(SPECS, LIVES, st.sampled_from([PER_WORKER, REFERENCE_2]))
def test_a_schedule_has_gone_as_far_as_the_samples(spec, lives, policy):
    walk = Walk(spec, policy)
    steps, epoch, before_epoch = 0, 0, 0
    for size, count in lives:
        for window in walk.live(size, count):
            if window.before.epoch != epoch:
                if not spec.drop_last:
                    assert steps == before_epoch + spec.windows
                epoch, before_epoch = window.before.epoch, steps
            assert steps == before_epoch + sum(end <= window.before.consumed for end in ends(spec))
            steps += walk.due
    assert walk.rate.to_json()["progress"] == steps


@given(SPECS, LIVES)
def test_under_a_fixed_global_batch_each_step_is_one(spec, lives):
    walk = Walk(spec, FixedGlobalBatch())
    for size, count in lives:
        for _ in walk.live(size, count):
            assert walk.due == 1


@given(SPECS, LIVES, st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1))
def test_under_adascale_a_schedule_goes_by_the_gains(spec, lives, squares):
    walk = Walk(spec, FixedPerWorkerBatch(scaling="adascale"))
    gains, steps = [], 0
    for size, count in lives:
        for window in walk.live(size, count):
            local, mean = squares[len(gains) % len(squares)]
            sizes = {"micro_batches": size, "count": window.count, "reference": spec.global_batch_size}
            walk.rate.observe(local, mean, **sizes)
            gains.append(walk.rate.factor)  # there is no momentum, so no ramp
            assert 1 <= gains[-1] <= size
            steps += walk.rate.steps_of(window)
            assert steps == int(sum(gains))


@pytest.mark.parametrize("drop_last", [False, True], ids=["ragged", "dropped"])
@pytest.mark.parametrize("policy", [PER_WORKER, REFERENCE_2], ids=["of-1", "of-2"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", rates.SCHEDULERS)
def test_rates_are_those_of_the_reference_at_the_same_samples(name, policy, world_size, drop_last):
    spec = DataSpec(
        50, global_batch_size=8, seed=0, shuffle=True, drop_last=drop_last
    )  # 7 steps an epoch, the last one of 2 samples
    total = 3 * spec.windows
    curve = rates.curve(name, total)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rates.RATE, momentum=0.9)
    walk = Walk(spec, policy)
    schedule = Schedule(rates.SCHEDULERS[name](optimizer, total), lambda: walk.due)
    steps, trained = 0, 0
    for window in walk.live(world_size, 100):
        if window.before.epoch == 3:
            break
        if not drop_last:
            assert steps == window.before.epoch * spec.windows + window.before.consumed // 8
        elif policy is PER_WORKER:
            assert steps == trained // 8  # the curve over the samples that are trained
        assert schedule.get_last_lr() == [curve[steps]]
        optimizer.step()
        schedule.step()
        steps += walk.due
        trained += window.count
    assert schedule.get_last_lr() == [curve[steps]]
    assert drop_last or steps == total
    assert len(set(curve)) > 5


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (PER_WORKER, [(1, None)]),
        (PER_WORKER, [(2, None)]),
        (PER_WORKER, [(3, None)]),
        (PER_WORKER, [(1, 2), (3, 5), (2, None)]),
        (REFERENCE_2, [(1, 3), (3, None)]),
    ],
    ids=["1", "2", "3", "1-3-2", "of-2-1-3"],
)
def test_ranks_train_the_same_samples_at_the_same_rates(policy, sizes, tmp_path):
    spec = DataSpec(50, global_batch_size=8, seed=0, shuffle=True, drop_last=False)
    curves = {name: rates.curve(name, 2 * spec.windows) for name in rates.SCHEDULERS}
    walk, done = Walk(spec, policy), 0
    for size, stop in sizes:
        values = World(size, rates.follow, tmp_path, policy, 50, 8, 2, stop).values()
        assert all(value == values[0] for value in values)
        (found, last) = values[0]
        windows = list(walk.live(size, len(found)))
        assert [epoch for epoch, _ in found] == [window.before.epoch for window in windows]
        for (epoch, got), window in zip(found, windows, strict=True):
            at = epoch * spec.windows + window.before.consumed // 8
            assert got == {name: curve[at] for name, curve in curves.items()}
        done += len(found)
        assert stop is None or done == stop
    assert last == {name: curve[-1] for name, curve in curves.items()}


class Run:
    """A loop of one process."""

    def __init__(self, folder, policy=PER_WORKER, make=None, wrap=True, track=True, length=20):
        self.run = train.start(workers.policy(folder), batch=policy)
        training.MADE.append(self.run)
        self.model = self.run.wrap(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rates.RATE, momentum=0.9)
        made = (make or (lambda optimizer: lrs.ExponentialLR(optimizer, 0.5)))(self.optimizer)
        self.scheduler = self.run.schedule(made) if wrap else made
        self.run.track(model=self.model, optimizer=self.optimizer, **({"scheduler": self.scheduler} if track else {}))
        data = TensorDataset(torch.arange(float(length)).unsqueeze(1))
        self.loader = self.run.loader(data, global_batch_size=6)
        self.rates = []

    def steps(self, epochs, each_step=lambda this: this.scheduler.step(), each_epoch=lambda this: None, stop=None):
        with self.run:
            for _ in self.run.epochs(epochs):
                for (x,) in self.loader:
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                    self.run.backward(self.model(x).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    each_step(self)
                    self.run.commit()
                    if self.run.steps == stop:
                        return self.rates
                each_epoch(self)
        return self.rates


@pytest.mark.parametrize("name", rates.SCHEDULERS)
@pytest.mark.parametrize("wrap", [True, False])
def test_under_a_fixed_global_batch_a_schedule_is_the_plain_scheduler(name, wrap, tmp_path):
    this = Run(tmp_path, FixedGlobalBatch(), lambda optimizer: rates.SCHEDULERS[name](optimizer, 8), wrap=wrap)
    assert [*this.steps(2), *this.scheduler.get_last_lr()] == rates.curve(name, 8)


@pytest.mark.parametrize("name", rates.SCHEDULERS)
@pytest.mark.parametrize("policy", [PER_WORKER, FixedGlobalBatch()], ids=["per worker", "global"])
def test_a_schedule_goes_on_after_a_restart(name, policy, tmp_path):
    def make(optimizer):
        return rates.SCHEDULERS[name](optimizer, 8)

    first = Run(tmp_path, policy, make).steps(2, stop=5)
    second = Run(tmp_path, policy, make)
    assert second.run.steps == 5
    second.steps(2)
    assert [*first, *second.rates, *second.scheduler.get_last_lr()] == rates.curve(name, 8)
    third = Run(tmp_path, policy, make)
    assert third.scheduler.state_dict() == second.scheduler.state_dict()
    assert third.scheduler.last_epoch == 8
    third.run.finish()


def test_a_scheduler_that_is_stepped_with_the_optimizer_is_refused(tmp_path):
    this = Run(tmp_path, wrap=False)
    text = r"ExponentialLR was stepped with the optimizer.*scheduler = run\.schedule\(scheduler\), and track that"
    with pytest.raises(UsageError, match=text):
        this.steps(1)
    assert this.run.steps == 0


def test_a_scheduler_that_is_stepped_by_the_epoch_is_not_refused(tmp_path):
    this = Run(tmp_path, wrap=False)
    this.steps(2, lambda _: None, lambda this: this.scheduler.step())
    assert this.rates == [rates.RATE] * 4 + [rates.RATE / 2] * 4


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_schedule_is_stepped_within_a_step(where, tmp_path):
    this = Run(tmp_path)
    this.optimizer.step()  # torch warns if no optimizer step comes before the scheduler's
    text = r"outside of an optimizer step\. Call its step\(\) between optimizer\.step\(\) and run\.commit\(\)"
    if where == "before":
        with pytest.raises(UsageError, match=text):
            this.scheduler.step()
    elif where == "between":
        with pytest.raises(UsageError, match=text):
            this.steps(2, each_epoch=lambda this: this.scheduler.step())
    else:
        this.steps(1)
        with pytest.raises(UsageError, match=text):
            this.scheduler.step()
    assert len(this.rates) == {"before": 0, "between": 4, "after": 4}[where]


def test_a_scheduler_of_a_metric_counts_no_samples(tmp_path):
    def make(optimizer):
        return lrs.ReduceLROnPlateau(optimizer, patience=0)

    with pytest.raises(UsageError, match=r"ReduceLROnPlateau follows a metric.*without run\.schedule"):
        Run(tmp_path, make=make)
    this = Run(tmp_path, make=make, wrap=False)
    this.steps(3, lambda _: None, lambda this: this.scheduler.step(1.0))
    assert this.rates == pytest.approx([rates.RATE] * 8 + [rates.RATE / 10] * 4)


def test_a_schedule_is_in_all_else_the_scheduler(tmp_path):
    this = Run(tmp_path)
    assert this.scheduler.get_last_lr() == [rates.RATE]
    assert (this.scheduler.gamma, this.scheduler.last_epoch) == (0.5, 0)
    assert this.scheduler.optimizer is this.optimizer
    with pytest.raises(AttributeError, match="threshold"):
        _ = this.scheduler.threshold
    state = this.scheduler.state_dict()
    this.steps(1)
    assert this.scheduler.last_epoch == 4
    this.scheduler.load_state_dict(state)
    assert this.scheduler.last_epoch == 0


def test_accelerates_scheduler_is_unwrapped(accelerator, tmp_path):
    this = Run(tmp_path, make=lambda optimizer: accelerator.prepare(lrs.ExponentialLR(optimizer, 0.5)))
    this.steps(1)
    assert this.scheduler.last_epoch == 4
    assert this.rates == [rates.RATE / 2**step for step in range(4)]
    with pytest.raises(UsageError, match="ReduceLROnPlateau follows a metric"):
        this.run.schedule(accelerator.prepare(lrs.ReduceLROnPlateau(this.optimizer)))


def test_accelerates_scheduler_steps_by_samples_whatever_it_does_itself(tmp_path):
    pytest.importorskip("accelerate")
    found = World(2, rates.follow_accelerated, tmp_path, PER_WORKER).values()
    assert found == [[rates.RATE, rates.RATE / 4, rates.RATE / 16]] * 2  # not once more for each process


@pytest.mark.parametrize("policy", [PER_WORKER, FixedGlobalBatch()], ids=["per worker", "global"])
def test_a_chain_of_schedulers_counts_as_its_parts_do(policy, tmp_path):
    def make(optimizer):
        return lrs.ChainedScheduler([lrs.ExponentialLR(optimizer, 0.5)], optimizer=optimizer)

    this = Run(tmp_path, policy, make, wrap=False)
    if policy is PER_WORKER:
        with pytest.raises(UsageError, match="ChainedScheduler was stepped with the optimizer"):
            this.steps(1)
    else:
        this.steps(1)
        assert this.rates == [rates.RATE / 2**step for step in range(4)]


def test_a_scheduler_that_is_stepped_after_the_commit_is_refused_too(tmp_path):
    this = Run(tmp_path, wrap=False)
    loader = iter(this.loader)
    for step in range(2):
        (x,) = next(loader)
        this.run.backward(this.model(x).square().mean())
        this.optimizer.step()
        if step == 0:
            this.run.commit()
            this.scheduler.step()
    with pytest.raises(UsageError, match="ExponentialLR was stepped with the optimizer"):
        this.run.commit()


def test_a_schedule_follows_the_first_loader(tmp_path):
    this = Run(tmp_path)
    other = this.run.loader(TensorDataset(torch.zeros(64, 1)), global_batch_size=16, name="other")
    counts = []

    def end():
        this.model(torch.ones(2, 1)).square().mean().backward()
        this.optimizer.step()
        this.scheduler.step()
        this.run.commit()
        counts.append(this.scheduler.last_epoch)

    for _ in zip(other, this.loader, strict=False):
        end()
    for _ in other:
        end()
        break
    assert counts == [1, 2, 3, 4, 4]


def test_a_script_with_a_loader_of_its_own_has_schedules_too(tmp_path):
    for begin in (0, 3):
        run = train.start(workers.policy(tmp_path), batch=FixedGlobalBatch())
        model = run.wrap(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rates.RATE)
        schedule = run.schedule(lrs.ExponentialLR(optimizer, 0.5))
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        assert (run.steps, schedule.last_epoch) == (begin, begin)
        for _ in range(3):
            model(torch.ones(2, 1)).mean().backward()
            optimizer.step()
            schedule.step()
            run.commit()
        run.finish()
        assert schedule.last_epoch == begin + 3
        dist.destroy_process_group()
