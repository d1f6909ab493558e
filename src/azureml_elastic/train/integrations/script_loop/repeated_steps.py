"""Steps that are trained already, and that a restarted script goes through once more to count them.

Nothing is computed in them: models answer with the outputs of one batch of each size, optimizers do nothing, and no
rank waits for another. The losses are those of the trained steps, so that sums of the script's own come out as if they
had been computed in this process. A model that is sharded cannot compute that batch on one rank: a hollow copy does.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from azureml_elastic.plurals import counted
from azureml_elastic.train.integrations.nested import map_tensors, tensors_of
from azureml_elastic.train.integrations.script_loop.hollow_models import HollowModel, is_sharded

_LOG = logging.getLogger(__name__)

_LOG_SECONDS = 5.0

HISTORY = "history"
"""Name of the tracked :class:`StepHistory`."""


class RepetitionLog:
    """Tells the log how many trained steps a script counts once more, and from time to time how many are left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = 0
        self._next = 0.0

    def begin(self, steps: int) -> None:
        """Take the number of steps that a script begins with; a later part of them changes nothing."""
        if steps and not self._total:
            self._total, self._next = steps, self._clock() + _LOG_SECONDS
            # As a warning: scripts that do not configure logging show nothing below it.
            verb = "is" if steps == 1 else "are"
            _LOG.warning("The script counts %s that %s trained already.", counted(steps, "step"), verb)

    def go_on(self, left: Callable[[], int]) -> None:
        """Note that a step is repeated.

        Args:
            left: function that returns the number of steps that are left, called once in some seconds
        """
        if not self._total or self._clock() < self._next:
            return
        self._next = self._clock() + _LOG_SECONDS
        text = f"{self._total - left():,} of {self._total:,}"
        _LOG.warning("The script has counted %s steps that are trained already.", text)

    @staticmethod
    def warn_of_outputs(steps: int) -> None:
        """Say which numbers of an epoch are not those of the whole epoch, of which so many steps are trained."""
        _LOG.warning(
            "What the script computes from a model's outputs in this epoch, such as an accuracy, is that of its steps "
            "after the first %d: outputs are not kept. Losses and numbers of samples are those of all steps.",
            steps,
        )


class StepHistory:
    """The trained steps of each epoch, with the losses of this rank's micro-batches in them, as a tracked object.

    The loss of a micro-batch is the number that the script is likely to add up: the loss that the model returns, or
    else the one that goes backward.

    Args:
        batches: micro-batches of a step
        completed: returns the number of steps of the whole run, by which its state is compared before it is restored

    Attributes:
        entered: epoch of the newest pass over the data; once the last one is over, the run's position is behind it
    """

    def __init__(self, batches: int, completed: Callable[[], int]) -> None:
        self.entered = 0
        self._completed = completed
        self._batches = batches
        self._epochs: list[array[float]] = []
        self._counts: list[int] = []  # of the losses of each epoch, with those that are not read yet
        self._new: list[tuple[int, torch.Tensor]] = []  # on the device: to read them would wait for its kernels
        self._open: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch of the current step: one number, of shape () or (1,)."""
        self._open.append(loss.detach().float().reshape(()).clone())  # the script may change it in place

    def complete_step(self, epoch: int) -> None:
        """Count the current step."""
        missing = torch.tensor(float("nan"))
        self._new += [(epoch, loss) for loss in (self._open + [missing] * self._batches)[: self._batches]]
        self._counts += [0] * (epoch + 1 - len(self._counts))
        self._counts[epoch] += self._batches
        self._open.clear()

    def begin_at(self, epoch: int, steps: int) -> None:
        """Begin after a number of steps of an epoch, of which and of those before it nothing is known."""
        self._epochs = [array("f") for _ in range(epoch)] + [array("f", [float("nan")] * (steps * self._batches))]
        self._counts = list(map(len, self._epochs))
        self._new.clear()

    def steps(self, epoch: int) -> int:
        """Return the number of trained steps of an epoch."""
        return self._counts[epoch] // self._batches if epoch < len(self._counts) else 0

    def steps_from(self, epoch: int) -> int:
        """Return the number of trained steps of an epoch and all later ones."""
        return sum(map(self.steps, range(epoch, len(self._counts))))

    def loss(self, epoch: int, batch: int) -> float | None:
        """Return the loss of a micro-batch of an epoch, ``None`` if it is not known."""
        self._read()
        known = self._epochs[epoch] if epoch < len(self._epochs) else ()
        return known[batch] if batch < len(known) and known[batch] == known[batch] else None

    def state_dict(self) -> dict[str, Any]:
        """Return all losses of completed steps."""
        self._read()
        losses = array("f", itertools.chain.from_iterable(self._epochs))
        tensor = torch.frombuffer(losses, dtype=torch.float32).clone() if losses else torch.empty(0)
        counts = {"batches": [*map(len, self._epochs)], "entered": self.entered, "steps": self._completed()}
        return {"losses": tensor, **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the losses of a state."""
        self.entered = state_dict["entered"]
        losses = iter(state_dict["losses"].float().cpu().tolist())
        self._counts = list(state_dict["batches"])
        self._epochs = [array("f", itertools.islice(losses, count)) for count in self._counts]
        self._new.clear()
        self._open.clear()

    def _read(self) -> None:
        # All losses of an epoch, (), in one copy to the host: to read each by itself would wait for its kernels.
        for (epoch, _), losses in itertools.groupby(self._new, key=lambda each: (each[0], each[1].device)):
            while len(self._epochs) <= epoch:
                self._epochs.append(array("f"))
            self._epochs[epoch].extend(torch.stack([loss for _, loss in losses]).tolist())
        self._new.clear()


class ReplacedCalls:
    """Calls of models that others stand for.

    It is the forward function that is replaced, so that a model's hooks run as they always do. Of a sharded model it is
    the whole call: its hooks gather weights from other ranks before the forward function begins, and a state that is
    restored in there would not reach the weights that they have gathered.

    Args:
        call: function in their place, of the model, its arguments and its named arguments
    """

    def __init__(self, call: Callable[[nn.Module, Any, Any], Any]) -> None:
        self._call = call
        # With the name of the attribute that is replaced, and what the model has there of its own.
        self._models: dict[int, tuple[nn.Module, str, Any]] = {}

    def replace(self, model: nn.Module) -> bool:
        """Replace the call of a model; return whether it was not replaced yet."""
        if id(model) in self._models:
            return False
        # nn.Module.__call__ calls the former, where it is set, in place of hooks and forward function.
        name = "_compiled_call_impl" if is_sharded(model) else "forward"
        self._models[id(model)] = model, name, model.__dict__.get(name)
        replacement = self._call

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return replacement(self, args, kwargs)

        setattr(model, name, MethodType(call, model))
        return True

    def own(self, model: nn.Module) -> Any:
        """Return the call, or the forward function, that a model has by itself."""
        _, name, before = self._models[id(model)]
        plain = type(model).forward if name == "forward" else type(model)._call_impl  # noqa: SLF001 - with its hooks
        return before or MethodType(plain, model)

    def end(self) -> None:
        """Give the models theirs again."""
        for model, name, before in self._models.values():
            if before is None:
                model.__dict__.pop(name, None)
            else:
                setattr(model, name, before)
        self._models.clear()


class FirstForward(ReplacedCalls):
    """Calls a function in the first forward pass with gradients of one of the models, before it computes anything."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__(self._begin_and_call)
        self._begin = begin

    def _begin_and_call(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(model)(*args, **kwargs)
        self.end()
        self._begin()
        call = model if is_sharded(model) else model.forward  # which may be another one now
        return call(*args, **kwargs)


class RepeatedModels:
    """Prepared models whose forward passes repeat outputs instead of computing them.

    Args:
        warn: says something once

    Attributes:
        certain: whether the script is known to train the batches, and not to look at them only: until then each forward
            pass is computed, as its batch is a real one
    """

    def __init__(self, models: Iterable[nn.Module], warn: Callable[[str], None]) -> None:
        self._models = list(models)
        self._warn = warn
        self.certain = False
        self._loss = _Loss(None, warn)
        self._outputs: dict[tuple[Any, ...], Any] = {}  # by model, and shapes of its inputs
        self._hollow: dict[int, HollowModel | None] = {}  # by sharded model; None where there cannot be one
        self._replaced = ReplacedCalls(self._answer)

    def begin(self) -> None:
        """Begin with repeated outputs."""
        self.certain = False
        for model in self._models:
            self._replaced.replace(model)

    def end(self) -> None:
        """Return to computed outputs."""
        self._replaced.end()
        self._outputs.clear()
        self._hollow.clear()  # their buffers are copies, which training outdates

    def set_loss(self, loss: float | None) -> None:
        """Set the loss of the micro-batch that follows, ``None`` where it is not known."""
        self._loss = _Loss(loss, self._warn)

    def _answer(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._compute(model, args, kwargs)  # an evaluation
        compute = self._compute_alone if is_sharded(model) else self._compute
        if not self.certain:
            loss = self._loss if model.training else _Loss(None, self._warn)
            return _answered(compute(model, args, kwargs), loss)
        # By shapes: a step may call a model with several batches.
        key = (id(model), *(each.shape for each in tensors_of((args, kwargs))))
        found = self._outputs.get(key)
        if found is None:
            found = compute(model, args, kwargs)
            # What a sharded model itself computes is not kept: the ranks must call it equally often.
            if self._hollow.get(id(model), model) is not None:
                self._outputs[key] = found
        return _answered(found, self._loss)

    def _compute(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute without gradients, and by the model alone: others would wait for the buffers of rank 0."""
        compute = model.module if isinstance(model, DistributedDataParallel) else self._replaced.own(model)
        with torch.no_grad():
            return compute(*args, **kwargs)

    def _compute_alone(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute in place of a sharded model, on this rank; together with all ranks where that cannot be."""
        key = id(model)
        try:
            if key not in self._hollow:
                self._hollow[key] = HollowModel(model)
            hollow = self._hollow[key]
            if hollow is not None:
                with torch.no_grad():
                    return hollow(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - of any code of the script's
            self._hollow[key] = None
            _LOG.warning(
                "Steps that are trained already are counted slowly, as %s computes each of them on all ranks: without "
                "weights of its own it fails by %r.",
                type(model).__name__,
                error,
            )
        return self._compute(model, args, kwargs)


class _Loss:
    """The loss of a micro-batch when it was trained, ``None`` where it is not known."""

    def __init__(self, value: float | None, warn: Callable[[str], None]) -> None:
        self.known = value is not None
        self._value = value
        self._warn = warn
        self._given = 0

    def of(self, number: torch.Tensor) -> torch.Tensor:
        """Return the loss in place of a number of shape () that is computed of outputs."""
        if self._value is None:
            return number.clone()
        self._given += 1
        if self._given > 1:
            self._warn("The script computes several numbers of a step that it repeats, such as terms of its loss: "
                       "each is the whole loss of that time, so that sums of them are too large for this "
                       "epoch.")  # fmt: skip
        return torch.full_like(number, self._value)


class _Answer(torch.Tensor):
    """An output of a repeated forward pass: what is computed from it into one number is the loss of that time."""

    loss: _Loss

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors, and take a single number for the loss."""
        found = [each.loss for each in tensors_of((args, kwargs or {})) if isinstance(each, _Answer)]
        loss = next((each for each in found if each.known), found[0])
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - the documented way
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        return result if name in ("__get__", "__set__", "__repr__", "__format__") else _answered(result, loss)


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss of shape () among a model's outputs, ``None`` if it computes none."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) and _is_number(output) else None


def _is_number(value: torch.Tensor) -> bool:
    return not value.dim() and value.is_floating_point()


def _answered(value: Any, loss: _Loss) -> Any:
    """Return a copy of a model's outputs, in which each single number is the loss."""
    return map_tensors(lambda each: _answer_of(each, loss), value)


def _answer_of(output: torch.Tensor, loss: _Loss) -> torch.Tensor:
    plain = output.as_subclass(torch.Tensor)
    if not plain.is_floating_point():
        return plain
    plain = plain.detach()
    if _is_number(plain):
        return loss.of(plain).requires_grad_()  # the script calls backward() of it, or of what it computes of it
    answer = plain.as_subclass(_Answer)
    answer.loss = loss
    return answer
