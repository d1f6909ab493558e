"""Whether the parts of a batch give what the whole batch does, found out once for each kind of arguments.

A forward pass may mix its samples in ways that no shape shows: by negatives within the batch, by statistics over it, by
a dimension of time that was taken for the samples. So it is computed whole and in parts, without gradients, and the
outputs are compared; the gradients are, for as many samples as a part has. Where it draws random numbers, they are the
same constants for all samples meanwhile. Nothing of it stays: neither in the generators, nor in the modules.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.train.integrations.nested import tensors_of
from azureml_elastic.train.integrations.script_loop.batch_layout import at
from azureml_elastic.train.integrations.script_loop.batch_parts import DividedArguments, IndivisibleError
from azureml_elastic.train.integrations.script_loop.part_outputs import OutputLayout, Weights, alike, without_caches

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")

_ROUNDED = 1e-4, 1e-3
"""Least relative errors that are taken for rounding, of outputs and of gradients."""

_CONTAINERS = (list, dict, set, deque)

_Forward = Callable[..., Any]


def check(
    model: nn.Module, forward: _Forward, given: DividedArguments, device: torch.device, labels: torch.Tensor | None
) -> OutputLayout:
    """Compute a forward pass whole and in parts, and return how the outputs of the parts make up those of the whole.

    Args:
        labels: labels of each sample, (samples,), over which a model's own loss is a mean

    Raises:
        IndivisibleError: they do not.
    """
    if hook := _foreign_hook(model):
        raise IndivisibleError(f"the hook {hook} would see each part by itself")
    generators, state = random_state.remembered(device), _ModuleState(model)

    def compute(args: Any, kwargs: Any) -> Any:
        try:
            return without_caches(forward(*args, **kwargs))
        finally:
            generators()

    try:
        return _compare(model, compute, given, state, labels)
    except IndivisibleError:
        raise
    except Exception as error:
        raise IndivisibleError(f"a part of it fails by {error!r}") from error
    finally:
        state.restore()
        generators()
        # Weights that were cast without gradients would be used again by a script that has opened the context itself.
        torch.clear_autocast_cache()


def _compare(
    model: nn.Module, compute: _Forward, given: DividedArguments, state: _ModuleState, labels: torch.Tensor | None
) -> OutputLayout:
    outputs, still, edges = OutputLayout(), _StillDraws(), given.edges
    with still, torch.no_grad():
        whole = compute(given.args, given.kwargs)
        if changed := state.changed():
            # Not by each batch, if it is what the first one sets up.
            raise IndivisibleError(f"its {changed} changes with each batch that it computes", always=False)
        parts = [
            compute(*given.part(start, stop, index if given.alone else None))
            for index, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
        outputs.learn(whole, parts, weights_of(edges, labels), still.limit(0))
        del whole, parts
    if not given.alone:
        with still:
            _compare_gradients(model, compute, given, outputs, labels, still)
    elif outputs.zeros:
        raise IndivisibleError("its outputs are zero, which shows nothing", always=False)
    return outputs


def weights_of(edges: list[int], labels: torch.Tensor | None) -> Weights:
    """Return the weights of parts in means, given the labels of each sample, (samples,)."""
    pairs = list(itertools.pairwise(edges))
    counted = None if labels is None else [int(labels[start:stop].sum()) for start, stop in pairs]
    return Weights([stop - start for start, stop in pairs], counted)


def _foreign_hook(model: nn.Module) -> str | None:
    """Return the name of a hook of the script's own that is called within a forward pass."""
    own = ("torch.", "transformers.", "peft.", "accelerate.", "deepspeed.")
    for module in model.modules():
        for hook in module._forward_hooks.values() if module is not model else ():  # noqa: SLF001
            if not str(getattr(hook, "__module__", "")).startswith(own):
                return str(getattr(hook, "__qualname__", type(hook).__name__))
    return None


def _compare_gradients(
    model: nn.Module,
    compute: _Forward,
    given: DividedArguments,
    outputs: OutputLayout,
    labels: torch.Tensor | None,
    still: _StillDraws,
) -> None:
    """Compare the gradients of a few samples with those of their halves.

    What is multiplied by zero, such as the output of a layer that is new, has gradients all the same.

    Raises:
        IndivisibleError: they differ.
    """
    start, middle, stop = _window(given, labels)
    of: list[torch.Tensor] = [each for each in model.parameters() if each.requires_grad]
    of += [each for each in tensors_of((given.args, given.kwargs)) if each.requires_grad]
    whole = compute(*given.part(start, stop))
    gradients = _gradients(whole, of)
    if any(at(whole, path).requires_grad for path in outputs.zeros):
        raise IndivisibleError("its loss is zero, which shows nothing", always=False)
    pieces = [compute(*given.part(start, middle)), compute(*given.part(middle, stop))]
    joined = outputs.join(pieces, weights_of([start, middle, stop], labels))
    if not alike(whole, joined, still.limit(0)):
        raise IndivisibleError("its outputs for a sample depend on the others")
    others = _gradients(joined, of)
    if gradients is None or others is None:
        if gradients is not others:
            raise IndivisibleError("its gradients depend on how the batch is divided")
        return
    limit = still.limit(1)
    norms = [None if each is None else each.norm().double() for each in gradients]
    total = math.sqrt(sum(float(each) ** 2 for each in norms if each is not None))
    for norm, one, other in zip(norms, gradients, others, strict=True):
        difference = other if one is None else one if other is None else one - other
        if difference is not None:
            error, own = float(difference.norm()), 0.0 if norm is None else float(norm)
            # Also relative to all gradients: one that is the small difference of large terms is rounding alone. Not
            # "error > ...": NaN is an error.
            if not error <= limit * own + 8 * still.eps * total:
                raise IndivisibleError("its gradients for a sample depend on the others")


def _window(given: DividedArguments, labels: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the samples whose gradients are compared: as many as a part has, with unequal halves where there are."""
    size = min(given.count, max(2, given.batch.limit))
    if labels is not None and len(uneven := (labels[1:] != labels[:-1]).nonzero()):
        middle = int(uneven[0]) + 1
        return middle - 1, middle, middle + 1
    return 0, size // 2, size


def _gradients(outputs: Any, of: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...] | None:
    """Return the gradients, of the shapes of ``of``, of a sum over all outputs in which each element has a factor."""
    total = None
    for each in tensors_of(outputs):
        if each.is_floating_point() and each.requires_grad:
            # In a plain sum the errors of two samples could cancel each other out.
            factors = torch.arange(1, each.numel() + 1, device=each.device, dtype=torch.float32).sin()  # (numel,)
            # Not all alike in a batch: a number itself, and vectors by their mean size.
            term = (each.float().flatten() * factors).sum() / math.sqrt(each.numel())
            total = term if total is None else total + term
    return None if total is None or not of else torch.autograd.grad(total, of, allow_unused=True)


class _StillDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has all random numbers be constants, leaves nothing out at random, and refuses to wait for other ranks.

    Attributes:
        eps: rounding of the least precise numbers that are computed
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        reduced = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
        self._reduced = 2.0**-10 if torch.accelerator.is_available() and reduced else 0.0
        self.eps = max(torch.finfo(torch.float32).eps, self._reduced)

    def limit(self, kind: int) -> float:
        """Return the relative error of outputs (0) or gradients (1) that may be rounding."""
        return max(_ROUNDED[kind], (4, 16)[kind] * self.eps)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator, without chance."""
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise IndivisibleError("it waits for other ranks, which may have another number of parts")
        random = torch.Tag.nondeterministic_seeded in func.tags
        result = _still(func, args, kwargs) if random else func(*args, **kwargs)
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return result


def _still(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator that draws random numbers with constants in place of them."""
    schema = func._schema  # noqa: SLF001 - torch has no other way to read it
    names = [each.name for each in schema.arguments]
    bound = dict(zip(names, args, strict=False)) | dict(kwargs)
    if schema.name in ("aten::native_dropout", "aten::_fused_dropout"):
        kind = torch.bool if schema.name == "aten::native_dropout" else torch.uint8
        return bound["input" if "input" in bound else "self"].clone(), torch.ones_like(args[0], dtype=kind)
    for name in ("dropout_p", "dropout"):
        if name in names:
            changed = list(args)
            if names.index(name) < len(changed):
                changed[names.index(name)] = 0.0
                return func(*changed, **kwargs)
            return func(*args, **{**kwargs, name: 0.0})
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor):
        raise IndivisibleError(f"it draws random numbers by {schema.name}")
    if schema.name == "aten::randperm":
        return result.copy_(torch.arange(result.numel(), device=result.device))
    if "bernoulli" in schema.name:
        return result.fill_(1)
    return result.fill_(0.5 if result.is_floating_point() else bound.get("low", bound.get("from", 0)) or 0)


class _ModuleState:
    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._buffers = [(module, dict(module._buffers)) for module in model.modules()]  # noqa: SLF001
        held = (value for _, found in (*self._attributes, *self._buffers) for value in found.values())
        tensors = {id(each): each for each in held if isinstance(each, torch.Tensor) and not each.is_inference()}
        self._tensors = [(each, each._version, each.detach().clone()) for each in tensors.values()]  # noqa: SLF001
        self._containers = [
            (value, value.copy())
            for _, found in self._attributes
            for name, value in found.items()
            if isinstance(value, _CONTAINERS) and name not in ("_parameters", "_buffers", "_modules")
        ]

    def changed(self) -> str | None:
        """Return the name of something that is no longer the same, ``None`` if all is."""
        versions = {id(each): version for each, version, _ in self._tensors}
        held = {id(value): _ids(copied) for value, copied in self._containers}
        for module, before, now in (
            *((module, found, vars(module)) for module, found in self._attributes),
            *((module, found, module._buffers) for module, found in self._buffers),  # noqa: SLF001
        ):
            for name in {**before, **now}:
                old, new = before.get(name, self), now.get(name, self)
                same = old is new or (isinstance(old, (int, float, str)) and type(old) is type(new) and old == new)
                if same and id(new) in versions:
                    same = versions[id(new)] == new._version  # noqa: SLF001
                if same and id(new) in held:
                    same = held[id(new)] == _ids(new)
                if not same:
                    return f"{type(module).__name__}.{name}"
        return None

    def restore(self) -> None:
        """Return everything to what it was."""
        if self.changed() is None:
            return
        for module, before in self._attributes:
            for name in vars(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        for module, before in self._buffers:
            module._buffers.clear()  # noqa: SLF001
            module._buffers.update(before)  # noqa: SLF001
        with torch.no_grad():
            for tensor, version, copied in self._tensors:
                if tensor._version != version:  # noqa: SLF001
                    tensor.copy_(copied)
        for container, content in self._containers:
            if _ids(container) != _ids(content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def _ids(container: Any) -> list[int]:
    return list(map(id, container.values() if isinstance(container, dict) else container))
