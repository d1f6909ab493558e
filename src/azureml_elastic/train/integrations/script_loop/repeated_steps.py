"""Steps that are trained already, and that a restarted script goes through once more to count them.

Nothing is computed in them: models answer with the outputs of one small batch, optimizers do nothing, and no rank waits
for another. The losses are those of the trained steps, so that sums of the script's own come out as if they had been
computed in this process.
"""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LossHistory", "RepeatedModels", "own_loss"]


class LossHistory:
    """The losses of this rank's micro-batches since the beginning of the run, as a tracked object.

    The loss of a micro-batch is the number that the script is likely to add up: the loss that the model returns, or
    else the one that goes backward.
    """

    def __init__(self) -> None:
        self._known = array("f")
        self._new: list[torch.Tensor] = []  # on the device: to read them would wait for its kernels
        self._open: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch of the current step."""
        self._open.append(loss.detach().float().reshape(()).clone())

    def complete_step(self, batches: int) -> None:
        """Count the losses of the current step, of a fixed number of micro-batches."""
        missing = torch.tensor(float("nan"))
        self._new += (self._open + [missing] * batches)[:batches]
        self._open.clear()

    def __getitem__(self, index: int) -> float | None:
        """Return the loss of a micro-batch of the run, ``None`` if it is not known."""
        self._read()
        return self._known[index] if index < len(self._known) and self._known[index] == self._known[index] else None

    def state_dict(self) -> dict[str, Any]:
        """Return all losses of completed steps."""
        self._read()
        return {"losses": torch.frombuffer(self._known, dtype=torch.float32).clone() if self._known else torch.empty(0)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the losses of a state."""
        self._known = array("f", state_dict["losses"].float().cpu().tolist())
        self._new.clear()
        self._open.clear()

    def _read(self) -> None:
        by_device = itertools.groupby(self._new, key=lambda loss: loss.device)
        for _, losses in by_device:
            self._known.extend(torch.stack(list(losses)).tolist())
        self._new.clear()


class RepeatedModels:
    """Prepared models whose forward passes repeat outputs instead of computing them.

    Args:
        models: models as the script calls them.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._loss: float | None = None
        self._outputs: dict[int, Any] = {}
        self._forwards: dict[int, Any] = {}  # those that the models have of their own

    def begin(self) -> None:
        """Begin with repeated outputs."""
        for model in self._models:
            self._replace(model)

    def end(self) -> None:
        """Return to computed outputs."""
        for model in self._models:
            before = self._forwards.pop(id(model), None)
            if before is None:
                model.__dict__.pop("forward", None)
            else:
                model.forward = before

    def set_loss(self, loss: float | None) -> None:
        """Set the loss of the micro-batch that follows, ``None`` where it is not known."""
        self._loss = loss

    def _replace(self, model: nn.Module) -> None:
        self._forwards[id(model)] = model.__dict__.get("forward")
        answer = self._answer

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return answer(self, args, kwargs)

        model.forward = MethodType(forward, model)

    def _answer(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(model) not in self._outputs:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            before = self._forwards[id(model)]
            compute = inner if inner is not model else before or MethodType(type(model).forward, model)
            with torch.no_grad():  # of the model alone: others would wait for the buffers of rank 0
                self._outputs[id(model)] = compute(*args, **kwargs)
        return _answered(self._outputs[id(model)], self._loss)


class _Answer(torch.Tensor):
    """An output of a repeated forward pass: what is computed from it into one number is the loss of that time."""

    loss: float | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors, and take a single number for the loss."""
        loss = _loss_of((args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - the documented way
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        return result if name in ("__get__", "__set__", "__repr__", "__format__") else _answered(result, loss)


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss among a model's outputs, ``None`` if it computes none."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) and _is_number(output) else None


def _is_number(value: torch.Tensor) -> bool:
    return not value.dim() and value.is_floating_point()


def _answered(value: Any, loss: float | None) -> Any:
    """Return a copy of a model's outputs, in which each single number is the loss."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value.as_subclass(torch.Tensor)
        plain = value.as_subclass(torch.Tensor).detach()
        if _is_number(plain):
            number = plain.clone() if loss is None else torch.full_like(plain, loss)
            return number.requires_grad_()
        answer = plain.as_subclass(_Answer)
        answer.loss = loss
        return answer
    if isinstance(value, Mapping):
        found = copy.copy(value)
        for key in value:
            found[key] = _answered(value[key], loss)  # type: ignore[index]
        return found
    if isinstance(value, (list, tuple)):
        items = [_answered(each, loss) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _loss_of(inputs: Any) -> float | None:
    if isinstance(inputs, _Answer):
        return inputs.loss
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        return next((loss for loss in map(_loss_of, inputs) if loss is not None), None)
    return None
