"""The learning task: noisy images of scikit-learn's digits, for one small network per seed, all trained at once."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

CLASSES, SIDE = 10, 8
TESTED, PROBED = 360, 512
PIXEL_NOISE, LABEL_NOISE = 0.25, 0.1

BLOCK = 960
"""Number of samples that are drawn at once."""


class Digits:
    """An endless stream of images for each seed, shifted by up to a pixel, with noise in pixels and labels.

    Sample ``n`` of a seed does not depend on the batches.

    Args:
        seeds: number of seeds
        seed: random seed of all streams

    Attributes:
        test: images (1800, 64) held out of all streams, and their labels
        probe: noisy images (512, 64) from the training images, and their labels without noise
    """

    def __init__(self, seeds: int, seed: int) -> None:
        self._shape, self._seed = (seeds, BLOCK), seed
        digits = load_digits()
        fixed = torch.Generator().manual_seed(1234)
        order = torch.randperm(len(digits.target), generator=fixed)
        images, labels = (
            torch.tensor(digits.images, dtype=torch.float32)[order] / 16,
            torch.tensor(digits.target)[order],
        )
        self._images, self._labels = _shifted(images[TESTED:]), labels[TESTED:]
        ids = torch.arange(TESTED).repeat(5)
        self.test = _noisy(_shifted(images[:TESTED]), ids, fixed), labels[ids]
        ids = torch.arange(PROBED)
        self.probe = _noisy(self._images, ids, fixed), self._labels[ids]

    def between(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples of the streams: images (seeds, samples, 64) and labels (seeds, samples)."""
        first = start // BLOCK
        blocks = [_block(self, number) for number in range(first, (stop - 1) // BLOCK + 1)]
        here = slice(start - first * BLOCK, stop - first * BLOCK)
        images, labels = blocks[0] if len(blocks) == 1 else (torch.cat(each, 1) for each in zip(*blocks, strict=True))
        return images[:, here], labels[:, here]

    def draw(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a block of samples."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + number)
        ids = torch.randint(len(self._labels), self._shape, generator=generator)
        wrong = torch.rand(self._shape, generator=generator) < LABEL_NOISE
        anything = torch.randint(CLASSES, self._shape, generator=generator)
        return _noisy(self._images, ids, generator), torch.where(wrong, anything, self._labels[ids])


@lru_cache(maxsize=2)
def _block(digits: Digits, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return digits.draw(number)


def _shifted(images: torch.Tensor) -> torch.Tensor:
    """Return the images (n, 8, 8) shifted to nine positions, as (9, n, 64)."""
    wide = functional.pad(images, (1, 1, 1, 1))
    shifted = [wide[:, down : down + SIDE, right : right + SIDE] for down in range(3) for right in range(3)]
    return torch.stack(shifted).flatten(2)


def _noisy(shifted: torch.Tensor, ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    images = shifted[torch.randint(len(shifted), ids.shape, generator=generator), ids]
    return images + PIXEL_NOISE * torch.randn(images.shape, generator=generator)


class Networks(nn.Module):
    """One multilayer perceptron for each seed; all parameters have the seeds as their first dimension.

    Args:
        seeds: number of seeds
        seed: random seed of the initial weights
        widths: widths of the layers
    """

    def __init__(self, seeds: int, seed: int, widths: tuple[int, ...] = (SIDE * SIDE, 128, 128, CLASSES)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            self.weights.append(torch.randn(seeds, fan_in, fan_out, generator=generator) * math.sqrt(2 / fan_in))
            self.biases.append(torch.zeros(seeds, 1, fan_out))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits (seeds, samples, 10) of images (seeds, samples, 64), or (samples, 64) for all seeds."""
        x = images.expand(len(self.weights[0]), -1, -1)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if layer == 0 else torch.relu(x), weight)
        return x

    def losses(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each seed's mean loss."""
        logits = self(images)
        labels = labels.expand(logits.shape[:2])
        return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)

    def accuracies(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each seed's share of correct predictions."""
        logits: torch.Tensor = self(images)
        return (logits.argmax(2) == labels).float().mean(1)
