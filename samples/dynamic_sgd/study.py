"""What becomes of learning when the number of workers changes, under each policy for batch and learning rate.

``W`` workers that train ``B`` samples each compute the mean gradient of ``W * B`` samples, so one process can do it for
all of them. What a world size does to batch, learning rate, momentum and schedule is the library's own code, attached
to torch's SGD; only the workers are simulated.

    python samples/dynamic_sgd                                       # writes benchmarks/results/dynamic-sgd.md and its
    picture python samples/dynamic_sgd --samples 60000 --seeds 4 --out /tmp  # a quick look

It needs ``pip install 'azureml-elastic[node,demo]'``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from problem import Digits, Networks
from torch.optim.lr_scheduler import MultiStepLR

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.config import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.position import Batching, MicroBatch, Position, Window
from azureml_elastic.train.data.sampling import Cursor, DataSpec
from azureml_elastic.train.optim.learning_rate import LearningRate, Schedule
from azureml_elastic.train.step_state import StepMachine

CHANCE = 2.2
"""Test loss above which a network counts as diverged: guessing has ln 10 = 2.30."""

EVERY, FIRST_STEPS = 192, 60
"""The loss is measured every ``EVERY`` samples around a change, and after each of the ``FIRST_STEPS`` after it."""

BEFORE, AFTER = 3_840, 28_800
"""Samples around a change in which the loss is measured; a ramp from 1 to 12 workers takes 96 * 192 = 18,432."""

POLICIES: dict[str, BatchPolicy] = {
    "fixed global batch": FixedGlobalBatch(),
    "linear, unprepared": FixedPerWorkerBatch(scaling="linear", momentum="none"),
    "linear, ramp": FixedPerWorkerBatch(scaling="linear"),
    "linear, rescale": FixedPerWorkerBatch(scaling="linear", momentum="rescale"),
    "linear up to 6, ramp": FixedPerWorkerBatch(scaling="linear", max_scale=6),
    "square root, ramp": FixedPerWorkerBatch(scaling="sqrt"),
    "no scaling": FixedPerWorkerBatch(scaling="none"),
}
"""AdaScale is not compared: it needs the gradient of each worker, and a factor for each seed."""


@dataclass(frozen=True)
class Setting:
    """The training task and its numbers of workers.

    Args:
        worlds: world sizes, each with the share of all samples at which it begins
        samples: total number of trained samples
        rate: learning rate of one worker, before decays
        decays: shares of all samples at which the learning rate is divided by ten
        momentum: momentum of SGD
        batch: samples per worker and step
        seeds: number of networks that are trained at once
        seed: random seed of their weights and data
    """

    worlds: tuple[tuple[float, int], ...] = ((0, 1), (1 / 3, 12), (2 / 3, 1))
    samples: int = 360_000
    rate: float = 0.05
    decays: tuple[float, ...] = (1 / 2, 5 / 6)
    momentum: float = 0.9
    batch: int = 16
    seeds: int = 10
    seed: int = 0

    def steps_until(self, share: float) -> int:
        """Return the steps in which one worker trains a share of all samples."""
        return round(share * self.samples / self.batch)


class Simulation:
    """A run whose workers are simulated.

    Args:
        setting: setting of the study
        policy: batch policy of the run
        world_size: number of workers at the beginning, or when a saved state is loaded
    """

    def __init__(self, setting: Setting, policy: BatchPolicy, world_size: int) -> None:
        self.digits = Digits(setting.seeds, setting.seed)
        self.networks = Networks(setting.seeds, setting.seed)
        self.optimizer = torch.optim.SGD(self.networks.parameters(), setting.rate, setting.momentum, weight_decay=1e-4)
        self.steps = 0
        self._spec = DataSpec(setting.samples, global_batch_size=setting.batch, seed=0, shuffle=False, drop_last=False)
        self._batching = Batching(policy)
        self._position = Position(_identity(world_size))
        self._stream = self._position.add("digits", self._spec)
        self.rate = LearningRate(policy, self._position, StepMachine())
        self.rate.attach([self.optimizer])
        self.rate.enter(world_size)
        decay = MultiStepLR(self.optimizer, [setting.steps_until(share) for share in setting.decays])
        self._schedule = Schedule(decay, lambda: self.rate.steps_of(self._open))
        self._open: Window | None = None

    @property
    def seen(self) -> int:
        """Number of trained samples."""
        return self._stream.cursor.consumed

    def enter(self, world_size: int) -> None:
        """Change the number of workers."""
        self._position.enter(_identity(world_size))
        self.rate.enter(world_size)

    def step(self) -> None:
        """Train one step of all workers."""
        size = self._batching.window_size(self._spec.global_batch_size, self._position.identity.world_size)
        part = self._spec.window(self.seen, size)
        self._open = Window((), len(part), Cursor(0, part.start), Cursor(0, part.stop), self._spec.length)
        self._position.take(self._stream, MicroBatch(self._open, samples=len(part), weight=1.0))
        self.optimizer.zero_grad()
        self.networks.losses(*self.digits.between(part.start, part.stop)).sum().backward()
        self.optimizer.step()
        self._schedule.step()
        self._position.commit()
        self.rate.begin()
        self.rate.commit(self._open)
        self.steps += 1

    def save(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the content of a checkpoint: JSON and tensors."""
        tracked: dict[str, Any] = {"networks": self.networks, "optimizer": self.optimizer, "schedule": self._schedule}
        plain, tensors = tree.split("state", {name: each.state_dict() for name, each in tracked.items()})
        data = {"position": self._position.to_json(), "rate": self.rate.to_json()}
        return json.dumps({"state": plain, "steps": self.steps, **data}), {
            name: tensor.clone() for name, tensor in tensors.items()
        }

    def load(self, document: str, tensors: dict[str, torch.Tensor]) -> None:
        """Restore a saved state, with the current number of workers."""
        saved = json.loads(document)
        state = tree.join(saved["state"], tensors)
        self.networks.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.steps = saved["steps"]
        self._position.load(saved["position"])
        self.rate.load(saved["rate"])
        self.rate.enter(self._position.identity.world_size)


def _identity(world_size: int) -> WorkerIdentity:
    return WorkerIdentity(rank=0, local_rank=0, world_size=world_size, round=0)


@dataclass(frozen=True)
class Change:
    """The loss around a change of the world size.

    Args:
        at: number of samples trained before the change
        seen: number of samples trained before each measurement
        losses: losses on the held-out sample, (measurements, seeds)
    """

    at: int
    seen: torch.Tensor
    losses: torch.Tensor

    @property
    def before(self) -> torch.Tensor:
        """Each seed's mean loss shortly before the change."""
        return self.losses[self.seen <= self.at].mean(0)

    @property
    def peak(self) -> torch.Tensor:
        """Each seed's highest loss afterwards, as a multiple of the loss before; infinite where it has diverged."""
        highest = self.losses[self.seen > self.at].nan_to_num(nan=math.inf).max(0).values
        return highest / self.before


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Args:
        steps: number of optimizer steps
        losses: losses on the test images, (seeds,)
        accuracies: accuracies on the test images, (seeds,)
        changes: changes of the world size
    """

    steps: int
    losses: torch.Tensor
    accuracies: torch.Tensor
    changes: tuple[Change, ...]

    @property
    def lost(self) -> int:
        """Number of seeds whose network has diverged or guesses."""
        return int((~(self.losses < CHANCE)).sum())


@dataclass(frozen=True)
class Difference:
    """The difference between the mean test losses of two runs.

    Args:
        mean: difference, positive if the first run is worse
        error: standard error of the difference
    """

    mean: float
    error: float

    @property
    def significant(self) -> bool:
        """Whether the difference exceeds two standard errors."""
        return abs(self.mean) > 2 * self.error


def difference(ours: Outcome, theirs: Outcome, *, paired: bool) -> Difference:
    """Compare two runs; ``paired`` compares seed by seed, with equal initial weights and samples."""
    each = ours.losses - theirs.losses
    variance = each.var() if paired else ours.losses.var() + theirs.losses.var()
    return Difference(float(each.mean()), float((variance / len(each)).sqrt()))


@torch.no_grad()
def run(setting: Setting, policy: BatchPolicy) -> Outcome:
    """Train under a policy, and return the results."""
    (_, first), *later = [(setting.steps_until(share) * setting.batch, size) for share, size in setting.worlds]
    changes_at = [at for at, _ in later]
    simulation = Simulation(setting, policy, first)
    measured: list[tuple[int, torch.Tensor]] = []
    entered, since = [0], FIRST_STEPS
    while simulation.seen < setting.samples:
        if later and simulation.seen >= later[0][0]:
            simulation.enter(later.pop(0)[1])
            entered.append(simulation.seen)
            since = 0
        with torch.enable_grad():
            simulation.step()
        since += 1
        seen = simulation.seen
        near = any(at - BEFORE < seen <= at + AFTER + EVERY for at in changes_at)
        if since <= FIRST_STEPS or (near and (seen - entered[-1]) % EVERY == 0):
            measured.append((seen, simulation.networks.losses(*simulation.digits.probe)))
    test, changes = simulation.digits.test, tuple(_around(at, measured) for at in entered[1:])
    return Outcome(simulation.steps, simulation.networks.losses(*test), simulation.networks.accuracies(*test), changes)


def _around(at: int, measured: Sequence[tuple[int, torch.Tensor]]) -> Change:
    near = [(seen, losses) for seen, losses in measured if at - BEFORE < seen <= at + AFTER]
    return Change(at, torch.tensor([seen for seen, _ in near]), torch.stack([losses for _, losses in near]))
