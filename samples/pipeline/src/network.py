"""The network that ``train.py`` trains and ``evaluate.py`` evaluates."""

from __future__ import annotations

from torch import nn


def build() -> nn.Module:
    """Return a small convolutional network for images of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
