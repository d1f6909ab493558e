"""Values that the script logs, from the call to the message to the node's agent.

A value of a tensor on a GPU is copied to the host by the device's queue, and read when the copy is there, so that
logging makes the training loop wait for no kernel. Values of the step in progress are sent when it is committed, those
of a committed step at once, both when their copies have arrived, in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from azureml_elastic.distributed.device import Fetched, device_of
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.ipc.worker_messages import Logged
from azureml_elastic.ledger.metric_names import MOST_VALUES, name_problem

__all__ = ["LoggedValues"]


class LoggedValues:
    """Values of the step in progress and of committed steps that were not sent yet.

    Args:
        agent: receiver of the values of each step
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._in_progress: dict[str, float | Fetched] = {}
        self._committed: deque[tuple[int, dict[str, float | Fetched]]] = deque()
        self._names: set[object] = set()

    def add(self, values: Mapping[str, Any], step: int | None) -> None:
        """Add values of the step in progress, or send those of a completed step.

        Args:
            values: numbers by name
            step: completed step to which they belong, ``None`` for the step in progress

        Raises:
            UsageError: there are too many values, a name is not allowed, or a value is no number.
        """
        if not isinstance(values, Mapping):
            raise UsageError(
                f"run.log() takes values by name, as in run.log({{'loss': loss}}), not {type(values).__name__}."
            )
        if len(values) > MOST_VALUES:
            raise UsageError(
                f"run.log() was called with {len(values)} values; the limit is {MOST_VALUES}. Log a summary of them, "
                "or divide them among several calls."
            )
        for name in values:
            if name not in self._names:
                if problem := name_problem(name):
                    raise UsageError(f"run.log(): the name {name!r} {problem}.")
                self._names.add(name)
        read = {name: _number(name, value) for name, value in values.items()}
        if step is None:
            self._in_progress.update(read)
        else:
            self._committed.append((step, read))
            self.send(wait=False)

    def commit(self, step: int) -> None:
        """Assign the values of the step in progress to this step, and send all values that have arrived."""
        if self._in_progress:
            self._committed.append((step, self._in_progress))
            self._in_progress = {}
        self.send(wait=False)

    def drop(self) -> None:
        """Drop the values of the step in progress, which is not going to be committed."""
        self._in_progress = {}

    def send(self, *, wait: bool) -> None:
        """Send the values of committed steps.

        Args:
            wait: whether to wait for those that are still on a device
        """
        while self._committed:
            step, values = self._committed[0]
            if not wait and not all(value.arrived() for value in values.values() if isinstance(value, Fetched)):
                return
            self._committed.popleft()
            numbers = (
                (name, value if isinstance(value, float) else float(value.read().item()))
                for name, value in values.items()
            )
            while part := dict(islice(numbers, MOST_VALUES)):
                self._agent.report(Logged(step, part))


def _number(name: str, value: Any) -> float | Fetched:
    """Return a value as a number, or as a copy that becomes one.

    Raises:
        UsageError: the value is no number.
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"run.log(): {name!r} is a {value.dtype} tensor of the shape {tuple(value.shape)}; give one real "
                "number, such as value.mean()."
            )
        value = value.detach()
        return device_of(value.device).fetch(value)
    try:
        if isinstance(value, str | bytes):
            raise TypeError  # noqa: TRY301 - float() would read a text
        return float(value.item() if getattr(value, "size", 0) == 1 else value)  # an array of NumPy's
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"run.log(): {name!r} is {_shown(value)} of the type {type(value).__name__}; give one real number: a "
            "float, an int, or a tensor or an array of one element."
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - a line of the message
