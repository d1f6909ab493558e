"""The state of all tracked objects: collected as JSON and tensors, and restored.

Of ``torch.distributed.optim.ZeroRedundancyOptimizer`` each rank holds the state of its parameters, which torch can only
gather on one rank. Here each rank saves its part under the names that the state of an ordinary
optimizer has, and reads the part of the parameters that it has at the new world size.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from azureml_elastic.checkpoint.state.compatibility import (
    Kinds,
    class_differences,
    kinds_of,
    refuse,
    tensor_differences,
)
from azureml_elastic.checkpoint.state.deepspeed_engine import EngineState, is_engine
from azureml_elastic.checkpoint.state.tracked import (
    ModuleState,
    OptimizerState,
    OtherState,
    ShardedOptimizerState,
    Stateful,
    Tensors,
    Tracked,
    canonical_names,
    owner_of,
    restore_settings,
    settings_of,
    unwrap_optimizer,
    unwrap_scheduler,
)
from azureml_elastic.errors import UsageError

_T = TypeVar("_T")


def is_zero_redundancy(value: Any) -> bool:
    """Return whether this is a ``ZeroRedundancyOptimizer``, without importing it."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__)


@dataclass(eq=False)
class ZeroRedundancyState(Tracked):
    """The state of a ``ZeroRedundancyOptimizer``, whose parameters belong to the owner."""

    replicated: bool = field(default=False, init=False)
    optimizer: Any
    owner: nn.Module

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors = {}
        for parameter, path in self._owned():
            for key, value in self.optimizer.optim.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise UsageError(
                        f"The state of {self.name!r} holds {key}={value!r} for {path!r}; of a ZeroRedundancyOptimizer "
                        "only tensors can be saved. Use an optimizer of torch.optim in it."
                    )
                tensors[f"{path}/{key}"] = value
        return {"param_groups": settings_of(self.optimizer.param_groups)}, tensors

    @property
    @override
    def class_name(self) -> str:
        return type(self.optimizer.optim).__name__

    @override
    def differences(self, plain: Any, stored: Kinds, present: Kinds) -> list[str]:
        common = stored.keys() & present.keys()  # each rank has a part
        return tensor_differences({name: stored[name] for name in common}, {name: present[name] for name in common})

    @override
    def wants(self, tensor: str) -> bool:
        return tensor.rpartition("/")[0] in self._paths

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        for mine in (self.optimizer.param_groups, self.optimizer.optim.param_groups):
            restore_settings(mine, plain["param_groups"])
        by_path: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            path, _, kind = key.rpartition("/")
            by_path[path][kind] = tensor
        for parameter, path in self._owned():
            if found := by_path.get(path):
                # As in torch, tensors without dimensions, such as Adam's step, stay on the CPU.
                self.optimizer.optim.state[parameter] = {
                    kind: tensor.clone() if tensor.dim() == 0 else tensor.to(parameter.device, copy=True)
                    for kind, tensor in found.items()
                }

    @functools.cached_property  # asked for with each tensor of a checkpoint
    def _paths(self) -> set[str]:
        return {path for _, path in self._owned()}

    def _owned(self) -> list[tuple[torch.Tensor, str]]:
        names = canonical_names(self.owner)
        return [
            (parameter, f"{self.name}/state/{names[parameter]}")
            for group in self.optimizer.optim.param_groups
            for parameter in group["params"]
        ]


class TrackedState:
    """The state of the tracked objects.

    Args:
        partial: names of objects of which a checkpoint may fit a part alone.
        found: state beside them that nobody has declared: a checkpoint may have none, or another one.

    Raises:
        UsageError: an object has no state, or an optimizer has parameters of no tracked module.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        partial: Collection[str] = (),
        found: Tracked | None = None,
    ) -> None:
        self.names = sorted(objects)
        self._partial = frozenset(partial)
        self._differing: dict[str, list[str]] = {}
        self._other_class: set[str] = set()
        values = {name: unwrap_optimizer(value) for name, value in objects.items()}
        engines = {name: value for name, value in values.items() if is_engine(value)}
        modules = {name: each for name, each in values.items() if isinstance(each, nn.Module) and name not in engines}
        self._tracked = [_tracked(name, value, modules, engines) for name, value in values.items()]
        self._engine = next((each for each in self._tracked if isinstance(each, EngineState)), None)
        self._undeclared = frozenset() if found is None else frozenset([found.name])
        if found is not None:
            self._tracked.append(found)

    @property
    def modules(self) -> list[nn.Module]:
        """The tracked modules, without those of engines."""
        return [each.module for each in self._tracked if isinstance(each, ModuleState)]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, including those of engines."""
        return [each.optimizer for each in self._tracked if hasattr(each, "optimizer")]

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The tracked torch schedulers of steps or epochs."""
        values = (unwrap_scheduler(each.value) for each in self._tracked if isinstance(each, OtherState))
        # That one follows a metric, though it is an LRScheduler too.
        values = (value for value in values if not isinstance(value, ReduceLROnPlateau))
        return [value for value in values if isinstance(value, LRScheduler)]

    @property
    def schedulers_of_engines(self) -> list[Any]:
        """The schedulers that engines step."""
        found = (each.engine.lr_scheduler for each in self._tracked if isinstance(each, EngineState))
        return [scheduler for scheduler in found if scheduler is not None]

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the full state."""
        return all(each.replicated for each in self._tracked)

    @property
    def copies(self) -> float:
        """Number of copies of each part of the state over the ranks, see :attr:`Tracked.copies`."""
        return min((each.copies for each in self._tracked), default=1)

    @property
    def scales_gradients(self) -> bool:
        """Whether a ``GradScaler`` is tracked, which fails on an optimizer step without gradients."""
        return any(type(each.value).__name__ == "GradScaler" for each in self._tracked if isinstance(each, OtherState))

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, (), through the engine where one is tracked.

        Raises:
            UsageError: the configuration of the engine does not allow it.
        """
        if self._engine is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._engine.backward(loss)

    def accumulate(self, *, last: bool) -> None:
        """Set on the engine, where one is tracked, whether the next pass is the last one of a step.

        Raises:
            UsageError: the engine is not configured for several passes.
        """
        if self._engine is not None:
            self._engine.accumulate(last=last)

    def drop_gradients(self) -> None:
        """Drop all gradients, so that an optimizer step changes nothing."""
        for each in self._tracked:
            if isinstance(each, ModuleState):
                for parameter in each.module.parameters():
                    parameter.grad = None

    def untrained_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the weights of modules that no optimizer changes, such as moving averages; see :meth:`weights`."""
        trained = {id(each) for optimizer in self.optimizers for group in optimizer.param_groups
                   for each in group["params"]}  # fmt: skip
        modules = (each for each in self.modules if not any(id(weight) in trained for weight in each.parameters()))
        return _with_copies(modules)

    def weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's part of each weight of all modules, with a CPU copy of the same shape and type."""
        return _with_copies(self.modules)

    def owned(self) -> tuple[list[torch.Tensor], list[Any]]:
        """Return this rank's part of the modules' tensors and of their gradients, and the tracked objects."""
        parts = [each for module in self.modules for each in (*module.parameters(), *module.buffers())]
        gradients = [each.grad for each in parts if each.grad is not None]
        tensors = [each.to_local() if isinstance(each, DTensor) else each for each in (*parts, *gradients)]
        objects = [each.value for each in self._tracked if isinstance(each, OtherState)]
        return tensors, [*objects, *map(unwrap_scheduler, objects), *self.optimizers]

    def others(self) -> dict[str, Any]:
        """Return a copy of the states of schedulers and other objects than modules and optimizers."""
        others = (each for each in self._tracked if isinstance(each, OtherState))
        return {each.name: copy.deepcopy(each.value.state_dict()) for each in others}

    def restore_others(self, states: Mapping[str, Any]) -> None:
        """Restore what :meth:`others` returned."""
        for each in self._tracked:
            if isinstance(each, OtherState):
                each.value.load_state_dict(states[each.name])

    def collect(self, *, is_main: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state as JSON and as tensors that alias the live ones.

        Rank 0 (``is_main``) alone saves what may differ between ranks: buffers, and objects that are neither module nor
        optimizer.

        Raises:
            UsageError: a state cannot be saved.
        """
        plain: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for each in self._tracked:
            plain[each.name], found = each.collect()
            if not is_main:
                keep = each.common(found)
                found = {key: tensor for key, tensor in found.items() if key in keep}
            tensors.update(found)
        return plain, tensors

    def collect_held(self) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
        """Return all that this rank holds of the state, and the names of what may differ between ranks.

        Without the other ranks, at any moment between two changes of the state: what is gathered for a forward pass
        that was interrupted is given up.

        Raises:
            UsageError: a state cannot be saved.
        """
        for module in () if self.replicated else self.modules:
            module.state_dict()  # which has FSDP2 put its shards back in place, that optimizers refer to
        self.drop_gradients()
        plain, tensors = self.collect(is_main=True)
        common = {key for each in self._tracked for key in each.common(_of(each.name, tensors))}
        return plain, tensors, sorted(tensors.keys() - common)

    def targets(self, plain: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return tensors by name to read a checkpoint into, whose state as JSON is ``plain``.

        Raises:
            UsageError: the checkpoint holds other names, or does not fit an object.
        """
        self._require_names(plain)
        tensors: dict[str, torch.Tensor] = {}
        for each in self._tracked:
            if each.name in plain:
                with _fitting(each):
                    tensors.update(each.targets(plain[each.name]))
        return tensors

    def check(
        self, where: str, plain: Mapping[str, Any], classes: Mapping[str, str], stored: Kinds
    ) -> UsageError | None:
        """Return why a checkpoint at a path does not fit, ``None`` if it does, or must be restored in part only."""
        self._differing = {}
        self._other_class.clear()
        for each in self._tracked:
            if each.name not in plain:
                continue
            found = class_differences(classes.get(each.name), each.class_name)
            if found:
                self._other_class.add(each.name)
            else:
                both = (_of(each.name, kinds) for kinds in (stored, kinds_of(each.targets(plain[each.name]))))
                relative = ({name.removeprefix(f"{each.name}/"): kinds[name] for name in kinds} for kinds in both)
                found = each.differences(plain[each.name], *relative)
            if found:
                self._differing[each.name] = found
        refused = {name: found for name, found in self._differing.items() if name not in self._partial}
        return refuse(where, refused) if refused else None

    @property
    def classes(self) -> dict[str, str]:
        """The classes of objects whose states only objects of the same class can continue from, by name."""
        return {each.name: each.class_name for each in self._tracked if each.class_name is not None}

    def wants(self, tensor: str) -> bool:
        """Return whether this rank needs a tensor of a checkpoint, by its name."""
        name = tensor.partition("/")[0]
        return all(each.wants(tensor) for each in self._tracked if each.name == name)

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Restore what :meth:`collect` returned, or the part of it that fits if :meth:`check` has allowed that.

        Returns:
            The names of tensors and states of parameters that were not restored.

        Raises:
            UsageError: the checkpoint holds other names, or does not fit an object.
        """
        self._require_names(plain)
        missing: list[str] = []
        differing, self._differing = self._differing, {}
        for each in self._tracked:
            with _fitting(each):
                if each.name not in plain:
                    missing += {each.name} - self._undeclared
                elif each.name in differing and each.name in self._other_class:
                    missing += each.begin_anew()
                elif each.name in differing:
                    fitting = each.fitting(plain[each.name], _of(each.name, tensors))
                    missing += each.restore_partly(plain[each.name], fitting)
                else:
                    each.restore(plain[each.name], tensors)
        return missing

    def _require_names(self, saved: Mapping[str, Any]) -> None:
        if not ({*saved} - self._undeclared) ^ {*self.names} <= self._partial:
            raise UsageError(
                f"The checkpoint holds {sorted({*saved} - self._undeclared)}, but this script tracks {self.names}. "
                "Track the same names, or start anew with an empty checkpoint folder."
            )


def _of(name: str, tensors: Mapping[str, _T]) -> dict[str, _T]:
    return {key: value for key, value in tensors.items() if key.startswith(f"{name}/")}


def _tracked(name: str, value: Any, modules: Mapping[str, nn.Module], engines: Mapping[str, Any]) -> Tracked:
    if "/" in name:
        raise UsageError(f"The name {name!r} holds a '/', which separates the parts of tensors' names.")
    for engine in engines.values():
        if value is not engine and any(value is part for part in EngineState.parts(engine)):
            raise UsageError(
                f"{name}={type(value).__name__} belongs to the DeepSpeed engine that is tracked as well, and would be "
                "saved twice. Track the engine alone: it holds model, optimizer and scheduler."
            )
    if name in engines:
        return EngineState(name, value)
    if isinstance(value, nn.Module):
        return ModuleState(name, value)
    if isinstance(value, Optimizer):
        owner = owner_of(value, modules)
        if owner is None:
            raise UsageError(
                f"The parameters of {name!r} ({type(value).__name__}) do not all belong to tracked modules, so that "
                f"they have no names; tracked are {sorted(modules)}. Track the modules that the optimizer was made "
                "for in the same call; a script with accelerate gives them to prepare(). A parameter outside of "
                "modules goes into one."
            )
        if is_zero_redundancy(value):
            return ZeroRedundancyState(name, value, owner)
        return (OptimizerState if ModuleState(name, owner).replicated else ShardedOptimizerState)(name, value, owner)
    if isinstance(value, Stateful):
        return OtherState(name, value)
    raise UsageError(
        f"{name}={value!r} cannot be tracked: it has no state_dict() and load_state_dict(). Track modules, "
        "optimizers, and objects with both methods."
    )


@contextlib.contextmanager
def _fitting(tracked: Tracked) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(
            f"The checkpoint's {tracked.name!r} does not fit this script: {error} "
            "Restore the former definition, or start anew with an empty checkpoint folder."
        ) from error


def _with_copies(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    weights = (weight for module in modules for weight in module.parameters())
    parts = [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in weights]
    return [(part, part.to("cpu", copy=True)) for part in parts]
