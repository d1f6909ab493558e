"""The states of a script's loop, each with what is valid in it, and which of them follows which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.integrations.script_loop.repeated_steps import FirstForward, RepeatedModels


@dataclass
class Pass:
    """A pass of the script over its training data.

    Args:
        epoch: epoch of its batches, if it trains
        window: first step of the epoch that the script counts in it
        behind: steps that it counts and that are trained already
        past: whether the whole epoch is trained already
        yielded: batches that the script has taken before those that it trains for the first time
        used: whether the script has trained the batch that it has taken last
        opened: iteration over the training data, where the script has its first batches already
        over: whether the script has left it
    """

    epoch: int
    window: int = 0
    behind: int = 0
    past: bool = False
    trains: bool = False
    yielded: int = 0
    used: bool = False
    opened: Iterator[Any] | None = None
    over: bool = False


@dataclass(frozen=True)
class Looking:
    """The state of the run is not restored yet: the script may look at its data, and prepare further objects."""

    first_forward: FirstForward
    pass_: Pass | None = None


@dataclass(frozen=True)
class Left:
    """The script has no batch of its training data: it has left the pass, or has not taken the next batch of it."""

    pass_: Pass | None


@dataclass
class Repeating:
    """The script has a batch of a step that is trained already, if it trains in this pass.

    Args:
        models: the stack's models, which answer in place of computing
        accumulation: batches of a step
        number: number of the batch in the pass, counted from 1
        calls: calls of the script in this batch that wait for other ranks
        updated: whether the script has come to the update of the step
    """

    pass_: Pass
    models: RepeatedModels
    accumulation: int
    number: int = 0
    calls: int = 0
    updated: bool = False

    @property
    def last(self) -> bool:
        """Whether it is the last batch of its step."""
        return self.number % self.accumulation == 0


@dataclass
class Finishing:
    """The script does for the last trained step what follows a call that has failed in the former process."""

    pass_: Pass
    number: int
    calls: int


@dataclass
class Training:
    """The script has a batch that is trained for the first time.

    Args:
        calls: calls of the script in this batch that wait for other ranks
        stepped: whether an optimizer has stepped with it, in a step that is not counted
        completed: whether its step is counted
        noted: whether its loss is in the history
        own_loss: loss that the model has returned for it, of shape ()
    """

    pass_: Pass
    micro: MicroBatch
    calls: int = 0
    stepped: bool = False
    completed: bool = False
    noted: bool = False
    own_loss: torch.Tensor | None = None


State = Looking | Left | Repeating | Finishing | Training

_ENTERED, _TAKEN, _LEFT = "the script begins a pass", "the next batch is taken, not yet trained", "the pass is left"

FOLLOWING: dict[type[State], dict[type[State], str]] = {
    Looking: {Looking: _ENTERED, Left: "a model computes with gradients, or a loss goes backward"},
    Left: {Left: _ENTERED, Repeating: "the pass has steps that are trained already", Training: _TAKEN},
    Repeating: {Left: "those steps are repeated", Finishing: "the call is reached that failed in the former process"},
    Finishing: {Training: _TAKEN, Left: _LEFT},
    Training: {Training: _TAKEN, Left: _LEFT},
}
"""The states that follow each state, and when."""
