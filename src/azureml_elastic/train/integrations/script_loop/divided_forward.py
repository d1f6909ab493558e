"""Forward passes in parts, where the batch of a script is larger than its own.

With fewer ranks than the reference world size a rank's share of a step grows, and a script that counts batches must
see as many as before. So its batch is larger, and a model whose forward is divided here keeps the memory of a small
one: each part is computed under activation checkpointing, which costs one more forward pass, and the outputs are put
together. Gradients are those of the undivided batch, and data parallelism reduces them once, as autograd adds up a
parameter's contributions first.

What cannot be divided is computed whole, with a warning: the same gradients, for more memory.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.train.integrations.script_loop.batch_layout import Path
from azureml_elastic.train.integrations.script_loop.batch_parts import CurrentBatch, DividedArguments, IndivisibleError
from azureml_elastic.train.integrations.script_loop.division_check import check, weights_of
from azureml_elastic.train.integrations.script_loop.hollow_models import is_sharded
from azureml_elastic.train.integrations.script_loop.part_outputs import OutputLayout, without_caches

_LOG = logging.getLogger(__name__)

_SHARDED_WEIGHTS = 3

_SHIFTING = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes whose loss leaves out each sequence's first label."""

_ATTEMPTS = 8
"""Checks of a model that end without a division, after which all its batches are computed whole."""

_STRUCTURES = 64
"""Kinds of arguments of a model that are distinguished, each of which costs a check."""


def divide_forward(model: nn.Module, batch: CurrentBatch) -> None:
    """Have the training batches of a model computed in parts, as far as they give the same as the whole batch.

    Args:
        batch: batch that the script has at the time
    """
    wrapper: Any = model
    stage = wrapper.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None
    if stage is not None or isinstance(model, DistributedDataParallel):
        model = wrapper.module
    if reason := _obstacle(model, stage):
        _warn(model, reason)
        return
    inner = model.forward
    divisions: WeakKeyDictionary[nn.Module, _Divisions] = WeakKeyDictionary()

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A copy of the model, such as one of averaged weights, has this method as well, bound to itself.
        whole = MethodType(inner.__func__, self) if isinstance(inner, MethodType) else inner
        if not (self.training and torch.is_grad_enabled()) or batch.busy:
            return whole(*args, **kwargs)
        if self not in divisions:
            divisions[self] = _Divisions()
        return divisions[self].compute(self, whole, batch, args, kwargs)

    model.forward = MethodType(forward, model)


def _obstacle(model: nn.Module, stage: int | None) -> str | None:
    if any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules()):
        return "batch normalisation would count each part twice"
    if hasattr(model, "_orig_mod"):
        return "it is compiled"
    if stage == _SHARDED_WEIGHTS or is_sharded(model):
        return "its weights are gathered for each forward pass, of which all ranks must have as many"
    return None


def _warn(model: nn.Module, reason: str) -> None:
    _LOG.warning(
        "With fewer ranks a batch is larger, and %s takes it whole, with as much memory as it needs: %s.",
        type(model).__name__,
        reason,
    )


@dataclass
class _Division:
    """What is known of forward passes with arguments of a kind.

    Args:
        outputs: how the outputs of parts make up those of the whole; ``None`` if they do not

    Attributes:
        passes: those since the beginning
        cut: whether parts are cut from the whole, as their outputs have its padding
    """

    outputs: OutputLayout | None
    passes: int = 0
    cut: bool = False

    @property
    def due(self) -> bool:
        """Whether it is time to check again, since samples may depend on each other in some batches only."""
        return self.outputs is not None and self.passes in (10, 100, 1000, 10000)


@dataclass
class _Divisions:
    _known: dict[Hashable, _Division] = field(default_factory=dict)
    _dims: dict[Path, int] = field(default_factory=dict)
    _failed: int = 0
    _warned: bool = False

    def compute(self, model: nn.Module, whole: Callable[..., Any], batch: CurrentBatch, args: Any, kwargs: Any) -> Any:
        """Compute a forward pass in parts where that is the same, and whole where it is not."""
        if self._failed >= _ATTEMPTS:
            return whole(*args, **kwargs)
        generators = None
        try:
            given = DividedArguments(batch, args, kwargs, self._dims)
            if not given.count:
                return whole(*args, **kwargs)
            generators = random_state.remembered(batch.device)
            with batch.divided():
                found, labels = self._division(model, whole, given)
                if found is not None and found.outputs is not None:
                    found.passes += 1
                    try:
                        return self._in_parts(whole, given, found, found.outputs, labels)
                    except IndivisibleError:
                        found.outputs = None
                        raise
        except IndivisibleError as reason:
            self._failed += 1
            # Once, and not for the first batch alone, by which a model may set itself up.
            if not self._warned and (reason.always or self._failed > 1):
                self._warned = True
                _warn(model, str(reason))
        if generators is not None:
            generators()
        return whole(*args, **kwargs)

    def _division(
        self, model: nn.Module, whole: Callable[..., Any], given: DividedArguments
    ) -> tuple[_Division | None, torch.Tensor | None]:
        """Return what is known of such a pass, after a check if it is the first one, and the labels of each sample."""
        first = self._known.get(given.signature)
        labels, uneven = None, False
        if first is None or first.outputs is None or first.outputs.reduces:
            labels = given.labels(shifted=any(kind.__name__.endswith(_SHIFTING) for kind in type(model).__mro__))
            # A mean over labels cannot be distinguished from one over samples while all samples have as many.
            uneven = given.uneven(labels)
        key = (given.signature, uneven)
        found = self._known.get(key)
        if found is None or found.due:
            if len(self._known) >= _STRUCTURES:
                raise IndivisibleError("its arguments have another structure in each batch", always=False)
            passes = 0 if found is None else found.passes
            try:
                found = _Division(check(model, whole, given, given.batch.device, labels), passes)
            except IndivisibleError as reason:
                if reason.always:
                    self._known[key] = self._known[given.signature] = _Division(None)
                raise
            self._known[key] = found
            self._known.setdefault(given.signature, found)
        return found, labels

    def _in_parts(
        self,
        forward: Callable[..., Any],
        given: DividedArguments,
        division: _Division,
        outputs: OutputLayout,
        labels: torch.Tensor | None,
    ) -> Any:
        edges = given.edges
        weights = weights_of(edges, labels)
        # Parts that are collated alone are padded to their own length, as they would be with all ranks.
        if given.alone or (given.padded and given.collatable and not division.cut):
            try:
                return outputs.join(_computed(forward, given, edges, alone=True), weights)
            except IndivisibleError:
                if given.alone:
                    raise
                division.cut = True
        return outputs.join(_computed(forward, given, edges, alone=False), weights)


def _computed(forward: Callable[..., Any], given: DividedArguments, edges: list[int], *, alone: bool) -> list[Any]:
    """Return the outputs of parts.

    Raises:
        IndivisibleError: a part fails.
    """

    def divided(*args: Any, **kwargs: Any) -> Any:
        with given.batch.divided():  # also when it is computed again, by the backward pass
            return forward(*args, **kwargs)

    found = []
    for index, (start, stop) in enumerate(itertools.pairwise(edges)):
        args, kwargs = given.part(start, stop, index if alone else None)
        try:
            # The reentrant kind takes no named arguments, and runs a backward pass of its own for each part, in which
            # data parallelism would reduce each parameter once more.
            result = checkpoint(divided, *args, use_reentrant=False, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise IndivisibleError(f"a part of it fails by {error!r}") from error
        found.append(without_caches(result))
    return found
