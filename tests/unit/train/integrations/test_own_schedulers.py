"""Schedulers that a script steps by itself: found by their optimizer, and at rest while steps are repeated."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR

from azureml_elastic.train.integrations.script_loop.own_schedulers import (
    note_schedulers,
    pause_schedulers,
    schedulers_of,
)


class Own(LambdaLR):
    """A scheduler with a step of its own."""

    calls = 0

    def step(self, *args):
        self.calls += 1
        super().step(*args)


def optimizer():
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)


def test_they_are_found_by_their_optimizer_without_their_parts():
    note_schedulers()
    one, other = optimizer(), optimizer()
    plateau, own = ReduceLROnPlateau(one), Own(one, lambda step: 1 / (1 + step))
    known, foreign = StepLR(one, 1), StepLR(other, 1)
    whole = SequentialLR(one, [StepLR(one, 1), StepLR(one, 1)], milestones=[2])
    assert schedulers_of([one], [known]) == [plateau, own, whole]
    assert schedulers_of([other], []) == [foreign]


def test_they_take_no_step_while_they_are_paused():
    note_schedulers()
    trained, past = optimizer(), [True]
    own, plateau = Own(trained, lambda step: 1 / (1 + step)), ReduceLROnPlateau(trained, factor=0.1, patience=0)
    free = StepLR(optimizer(), 1, gamma=0.5)
    before = own.calls
    for each in (trained, free.optimizer):
        each.step()
    pause_schedulers([own, plateau], lambda: past[0])
    for each in (own, free):
        each.step()
    plateau.step(1.0)
    plateau.step(2.0)
    assert (own.calls, own.last_epoch, free.last_epoch, trained.param_groups[0]["lr"]) == (before, 0, 1, 1.0)
    past[0] = False
    own.step()
    assert (own.calls, own.last_epoch, trained.param_groups[0]["lr"]) == (before + 1, 1, 0.5)
