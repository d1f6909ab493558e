"""The text of a script with a session whose steps take no time, and do what a test needs after each."""

from __future__ import annotations

from textwrap import indent

_SCRIPT = """
import os, pathlib, sys, time
import torch
from azureml_elastic import train

run = train.start()
model = run.wrap(torch.nn.Linear(1, 1)); optimizer = torch.optim.SGD(model.parameters(), lr=.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(torch.utils.data.TensorDataset(torch.ones({samples}, 1)), global_batch_size=4, seed=0)
for epoch in run.epochs(1):
    for (x,) in loader:
        loss = model(x).square().mean(); run.backward(loss); optimizer.step(); optimizer.zero_grad(); run.commit()
{after}
"""


def tiny_training(after_step: str, *, samples: int = 80_000) -> str:
    """Return the script.

    Args:
        after_step: what it does after each step, with ``os``, ``pathlib``, ``sys`` and ``time``.
        samples: number of samples, of which a step takes four.
    """
    return _SCRIPT.format(samples=samples, after=indent(after_step, " " * 8))
