"""What becomes of learning when the number of workers changes: SGD with momentum on scikit-learn's digits.

``W`` workers that train ``B`` samples each compute the gradient of a batch of ``W * B`` samples, so one process does
for all of them; what the world size does to batch, learning rate and momentum is the library's own code, attached to
torch's SGD. All seeds are trained at once, as one batched network. Sample ``n`` of a seed is the same under each
policy.

    python samples/dynamic_sgd             # everything; writes docs/dynamic-sgd.md and its picture
    python samples/dynamic_sgd --samples 60000 --out /tmp    # a quick look

``pip install 'azureml-elastic[demo]'`` brings what it needs.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from azureml_elastic.spec import BatchPolicy
from azureml_elastic.train.agent import Identity
from azureml_elastic.train.learning_rate import LearningRate
from azureml_elastic.train.loader import Batching
from azureml_elastic.train.position import MicroBatch, Position, Window
from azureml_elastic.train.sampling import Cursor, DataSpec
from azureml_elastic.train.schedule import Schedule

CLASSES, PIXELS = 10, 64
HELD_OUT = 360
BLOCK = 960
"""Samples that are drawn at once."""

PIXEL_NOISE, LABEL_NOISE = 0.25, 0.1
CHANCE = 2.2
"""A loss from which a network is lost: guessing has ln 10 = 2.30."""

EVERY, FIRST_STEPS = 192, 60
"""Around a change the loss is measured every so many samples, and after each of the first steps."""

LEAD, FOLLOW = 4 * 960, 30 * 960
"""Samples before and after a change of which the loss is measured."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and by how many workers.

    Args:
        worlds: world sizes, each with the share of all samples from which on it holds.
        samples: that are trained in all.
        lr: at one worker, before decays.
        decays: shares of all samples at which the learning rate is divided by ten.
        momentum: of SGD.
        weight_decay: of SGD.
        batch: samples of a worker and step.
        seeds: networks that are trained at once.
        seed: of all of them.
    """

    worlds: tuple[tuple[float, int], ...] = ((0, 1), (1 / 3, 12), (2 / 3, 1))
    samples: int = 360_000
    lr: float = 0.05
    decays: tuple[float, ...] = (1 / 2, 5 / 6)
    momentum: float = 0.9
    weight_decay: float = 1e-4
    batch: int = 16
    seeds: int = 10
    seed: int = 0

    def at(self, share: float) -> int:
        """Return a share of all samples, in whole steps of one worker."""
        return round(share * self.samples / self.batch) * self.batch

    @property
    def changes(self) -> list[tuple[int, int]]:
        """From which sample on which world size holds."""
        return [(self.at(share), world_size) for share, world_size in self.worlds]


class Digits:
    """Images of digits, each shifted by up to one pixel, with noise in pixels and labels.

    Args:
        setting: of the study.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        digits = load_digits()
        generator = torch.Generator().manual_seed(1234)
        order = torch.randperm(len(digits.target), generator=generator)
        images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16  # (1797, 8, 8)
        labels = torch.tensor(digits.target)[order]
        self._images, self._labels = _shifted(images[HELD_OUT:]), labels[HELD_OUT:]
        held_out = _shifted(images[:HELD_OUT])
        self.test = self._noisy(held_out, labels[:HELD_OUT].repeat(5), torch.arange(HELD_OUT).repeat(5), generator)
        self.probe = self._noisy(self._images, self._labels[:1024], torch.arange(1024), generator)

    def window(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (seeds, samples, 64) and labels (seeds, samples)."""
        first, last = start // BLOCK, (stop - 1) // BLOCK
        blocks = [_block(self, number) for number in range(first, last + 1)]
        images, labels = (blocks[0] if len(blocks) == 1 else [torch.cat(each, 1) for each in zip(*blocks, strict=True)])
        here = slice(start - first * BLOCK, stop - first * BLOCK)
        return images[:, here], labels[:, here]

    def draw(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a block of samples."""
        generator = torch.Generator().manual_seed(self._setting.seed * 1_000_003 + number)
        shape = (self._setting.seeds, BLOCK)
        ids = torch.randint(len(self._labels), shape, generator=generator)
        images, labels = self._noisy(self._images, self._labels[ids], ids, generator)
        wrong = torch.rand(shape, generator=generator) < LABEL_NOISE
        return images, torch.where(wrong, torch.randint(CLASSES, shape, generator=generator), labels)

    @staticmethod
    def _noisy(
        shifted: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images = shifted[torch.randint(len(shifted), ids.shape, generator=generator), ids]
        return images + PIXEL_NOISE * torch.randn(images.shape, generator=generator), labels


@lru_cache(maxsize=2)
def _block(digits: Digits, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return digits.draw(number)


def _shifted(images: torch.Tensor) -> torch.Tensor:
    """Return the images (n, 8, 8) in each of nine places, as (9, n, 64)."""
    wide = functional.pad(images, (1, 1, 1, 1))
    places = [wide[:, down : down + 8, right : right + 8] for down in range(3) for right in range(3)]
    return torch.stack(places).flatten(2)


class Networks(nn.Module):
    """One multilayer perceptron for each seed; their parameters have the seeds as first dimension.

    Args:
        seeds: their number.
        seed: of all initial weights.
        widths: of the layers.
    """

    def __init__(self, seeds: int, seed: int, widths: tuple[int, ...] = (PIXELS, 128, 128, CLASSES)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
            self.weights.append(torch.randn(seeds, fan_in, fan_out, generator=generator) * math.sqrt(2 / fan_in))
            self.biases.append(torch.zeros(seeds, 1, fan_out))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits (seeds, samples, 10) of images (seeds, samples, 64), or of (samples, 64) for all seeds."""
        x = images.expand(len(self.weights[0]), -1, -1)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if layer == 0 else torch.relu(x), weight)
        return x

    def losses(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each seed's mean loss."""
        logits = self(images)
        labels = labels.expand(logits.shape[:2])
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)


class Simulation:
    """A run whose workers are simulated.

    Args:
        setting: of the study.
        policy: of the run.
    """

    def __init__(self, setting: Setting, policy: BatchPolicy) -> None:
        self.setting = setting
        self.digits = Digits(setting)
        self.networks = Networks(setting.seeds, setting.seed)
        self.optimizer = torch.optim.SGD(
            self.networks.parameters(), setting.lr, setting.momentum, weight_decay=setting.weight_decay
        )
        self.batching = Batching(policy)
        self.position = Position(_identity(setting.worlds[0][1]))
        self.spec = DataSpec(setting.samples, setting.batch, seed=0, shuffle=False, drop_last=False)
        self.stream = self.position.add("digits", self.spec)
        self.rate = LearningRate(policy, self.position, lambda: False)
        self.rate.attach([self.optimizer])
        self.rate.enter(self.world_size)
        milestones = [setting.at(share) // setting.batch for share in setting.decays]
        decay = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones)
        self.schedule = Schedule(decay, lambda: self.rate.steps_of(self.position.opened[0].open.window))
        self.steps = 0

    @property
    def world_size(self) -> int:
        """Workers."""
        return self.position.identity.world_size

    @property
    def seen(self) -> int:
        """Samples that are trained."""
        return self.stream.cursor.consumed

    def enter(self, world_size: int) -> None:
        """Go on with another number of workers."""
        self.position.enter(_identity(world_size))
        self.rate.enter(world_size)

    def step(self) -> None:
        """Train the samples of one step of all workers."""
        size = self.batching.window_size(self.spec.global_batch_size, self.world_size)
        part = self.spec.window(self.seen, size)
        window = Window((), len(part), Cursor(0, part.start), Cursor(0, part.stop), self.spec.length)
        self.position.take(self.stream, MicroBatch(window, len(part), weight=1.0))
        self.optimizer.zero_grad()
        self.networks.losses(*self.digits.window(part.start, part.stop)).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.position.commit()
        self.rate.begin()
        self.rate.commit(window)
        self.steps += 1

    def save(self) -> tuple[bytes, str]:
        """Return the state as the bytes of its tensors, and the rest as JSON."""
        file = io.BytesIO()
        torch.save({"networks": self.networks.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        rest = {"position": self.position.to_json(), "rate": self.rate.to_json(), "steps": self.steps}
        return file.getvalue(), json.dumps({**rest, "schedule": self.schedule.state_dict()})

    def load(self, tensors: bytes, document: str) -> None:
        """Go to a saved state; the world size is that of this object."""
        state, rest = torch.load(io.BytesIO(tensors), weights_only=True), json.loads(document)
        self.networks.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(rest["schedule"])
        self.position.load(rest["position"])
        self.rate.load(rest["rate"])
        self.rate.enter(self.world_size)
        self.steps = rest["steps"]


def _identity(world_size: int) -> Identity:
    return Identity(rank=0, local_rank=0, world_size=world_size, round=0)


@dataclass(frozen=True)
class Change:
    """The loss around a change of the world size.

    Args:
        at: samples trained before it.
        seen: samples that were trained before each measurement.
        losses: of a fixed probe, (measurements, seeds).
    """

    at: int
    seen: torch.Tensor
    losses: torch.Tensor

    @property
    def before(self) -> torch.Tensor:
        """Each seed's mean loss shortly before."""
        return self.losses[self.seen <= self.at].mean(0)

    @property
    def peak(self) -> torch.Tensor:
        """Each seed's highest loss afterwards; infinite for one that has diverged."""
        return self.losses[self.seen > self.at].nan_to_num(nan=torch.inf).max(0).values


@dataclass(frozen=True)
class Outcome:
    """What a run has come to; tensors have one element for each seed."""

    steps: int
    test_loss: torch.Tensor
    accuracy: torch.Tensor
    changes: list[Change] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Seeds that have diverged, or only guess."""
        return int((~(self.test_loss < CHANCE)).sum())


@torch.no_grad()
def run(setting: Setting, policy: BatchPolicy) -> Outcome:
    """Train under a policy, and measure."""
    simulation = Simulation(setting, policy)
    waiting, entered = setting.changes[1:], [0]
    measured: list[tuple[int, torch.Tensor]] = []
    since = FIRST_STEPS
    while simulation.seen < setting.samples:
        if waiting and simulation.seen >= waiting[0][0]:
            simulation.enter(waiting.pop(0)[1])
            entered.append(simulation.seen)
            since = 0
        with torch.enable_grad():
            simulation.step()
        seen, since = simulation.seen, since + 1
        near = any(at - LEAD < seen <= at + FOLLOW for at, _ in setting.changes[1:])
        if since <= FIRST_STEPS or (near and (seen - entered[-1]) % EVERY == 0):
            measured.append((seen, simulation.networks.losses(*simulation.digits.probe)))
    images, labels = simulation.digits.test
    accuracy = (simulation.networks(images).argmax(2) == labels).float().mean(1)
    changes = [_around(at, measured) for at in entered[1:]]
    return Outcome(simulation.steps, simulation.networks.losses(images, labels), accuracy, changes)


def _around(at: int, measured: list[tuple[int, torch.Tensor]]) -> Change:
    near = [(seen, losses) for seen, losses in measured if at - LEAD < seen <= at + FOLLOW]
    return Change(at, torch.tensor([seen for seen, _ in near]), torch.stack([losses for _, losses in near]))
