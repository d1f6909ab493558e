"""Collecting and restoring the state of each kind of tracked object.

Modules and optimizers use ``torch.distributed.checkpoint.state_dict``, with canonical parameter names: wrappers of data
parallelism leave no trace, and FSDP2's shards stay shards. Other objects with ``state_dict`` and ``load_state_dict``
are saved by rank 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.state.compatibility import (
    Kinds,
    group_differences,
    optimizer_differences,
    parameter_differences,
    shape_differences,
    tensor_differences,
)
from azureml_elastic.errors import UsageError

Tensors = Mapping[str, torch.Tensor]


@runtime_checkable
class Stateful(Protocol):
    """An object that can be tracked besides modules and optimizers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


@dataclass(eq=False)
class Tracked(ABC):
    """The state of a tracked object.

    Its name is the first part of the names of its tensors.

    Attributes:
        replicated: whether every rank holds the full state.
    """

    name: str
    replicated: bool = field(default=True, init=False)

    @property
    def copies(self) -> float:
        """Number of copies of each part over the ranks, without limit where every rank holds the full state.

        1 also where a rank cannot collect its part without the others.
        """
        return math.inf if self.replicated else 1

    @abstractmethod
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the state as JSON, and tensors by name that alias the live ones: whole tensors, or DTensors of them.

        Raises:
            UsageError: the state cannot be saved.
        """

    def common(self, tensors: Tensors) -> set[str]:
        """Return the names of the tensors that other ranks than 0 may write too.

        Excluded are tensors that may differ between ranks: there the value of rank 0 is saved.
        """
        return set(tensors)

    def targets(self, plain: Any) -> dict[str, torch.Tensor]:  # noqa: ARG002 - for subclasses
        """Return tensors to read a checkpoint into, given its state as JSON: of the shapes and types of this object."""
        return self.collect()[1]

    @property
    def class_name(self) -> str | None:
        """Class whose states only objects of the same class can continue from; ``None`` where others can."""
        return None

    def differences(self, plain: Any, stored: Kinds, present: Kinds) -> list[str]:  # noqa: ARG002 - for subclasses
        """Return sentences that say why a checkpoint of an object of the same class does not fit this one.

        The names of the tensors are without that of the object.
        """
        return []

    def wants(self, tensor: str) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether this rank needs a tensor of the object, by its name."""
        return True

    def fitting(self, plain: Any, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return those of a checkpoint's tensors that fit one of this object's, where others do not."""
        present = self.targets(plain)
        return {
            name: tensor for name, tensor in tensors.items() if name in present and present[name].shape == tensor.shape
        }

    @abstractmethod
    def restore(self, plain: Any, tensors: Tensors) -> None:
        """Restore what :meth:`collect` returned, at any world size.

        Raises:
            RuntimeError: the state does not fit the object.
            ValueError: the state does not fit the object.
            KeyError: the state does not fit the object.
        """

    def restore_partly(self, plain: Any, tensors: Tensors) -> list[str]:  # noqa: ARG002 - for subclasses
        """Restore what fits of a state that does not fit as a whole: :meth:`fitting` has returned the tensors.

        Returns:
            The names of what begins anew: tensors, or the states of parameters.
        """
        raise ValueError(f"a {type(self).__name__} cannot be restored in part")

    def begin_anew(self) -> list[str]:
        """Leave the object as it is, where the state is that of another class, and return the names likewise."""
        return [self.name]


@dataclass(eq=False)
class ModuleState(Tracked):
    """The state of a module: parameters and buffers. Buffers may differ between ranks."""

    module: nn.Module

    def __post_init__(self) -> None:
        kinds = {type(module).__name__ for module in self.module.modules()}
        sharded = any(isinstance(tensor, DTensor) for tensor in self.module.parameters())
        self._gathers = "FullyShardedDataParallel" in kinds  # the first FSDP, whose state takes collectives
        self.replicated = not self._gathers and not sharded
        self._own_names: dict[str, str] = {}

    @property
    @override
    def copies(self) -> float:
        found = (copies_of(each) for each in self.module.parameters() if isinstance(each, DTensor))
        return 1 if self._gathers else min(found, default=math.inf)

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        if not self.replicated:
            return tree.split(self.name, get_model_state_dict(self.module))
        # Torch walks through all modules for the names, which takes several times as long as the rest.
        found = self.module.state_dict()
        if found.keys() != set(self._own_names.values()):
            canonical = get_model_state_dict(self.module)
            self._own_names = _own_names(canonical, found)
            return tree.split(self.name, canonical)
        return tree.split(self.name, {name: found[own] for name, own in self._own_names.items()})

    @override
    def common(self, tensors: Tensors) -> set[str]:
        # By memory: a buffer's name in the state may be another one than in the module.
        buffers = {buffer.untyped_storage().data_ptr() for buffer in self.module.buffers()}
        return {
            key
            for key, tensor in tensors.items()
            if isinstance(tensor, DTensor) or tensor.untyped_storage().data_ptr() not in buffers
        }

    @override
    def differences(self, plain: Any, stored: Kinds, present: Kinds) -> list[str]:
        return tensor_differences(stored, present)

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        set_model_state_dict(self.module, tree.join(plain, tensors))

    @override
    def restore_partly(self, plain: Any, tensors: Tensors) -> list[str]:
        return _copy_in(self.collect()[1], tensors)


@dataclass(eq=False)
class OptimizerState(Tracked):
    """The state of a torch optimizer by names of parameters, which belong to its owner.

    A new optimizer has none: it is not made to step for it, which those with a closure or modes of their own do not
    bear. That of a sharded owner does (:class:`ShardedOptimizerState`): its checkpoint is read into shards.
    """

    optimizer: Optimizer
    owner: nn.Module

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        found, names = self.optimizer.state_dict(), self._names()
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in found["param_groups"]]
        state = {names.get(key, key): value for key, value in found["state"].items()}
        return tree.split(self.name, {"state": state, "param_groups": groups, "parameters": self._parameters()})

    @property
    @override
    def class_name(self) -> str:
        return type(self.optimizer).__name__

    @override
    def differences(self, plain: Any, stored: Kinds, present: Kinds) -> list[str]:
        names = {name for group in self.collect()[0]["param_groups"] for name in group["params"]}
        # Of parameters with a state, by their own shapes: a new optimizer has no state of its own to compare.
        begun = _keys(plain["state"])
        before = {name: each["shape"] for name, each in plain["parameters"].items() if name in begun}
        return [
            *self._group_differences(plain),
            *shape_differences(before, {name: each["shape"] for name, each in self._parameters().items()}),
            *optimizer_differences(stored, present),
            *parameter_differences(begun, names),
        ]

    @override
    def fitting(self, plain: Any, tensors: Tensors) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        parameters = self._parameters()
        for name, before in plain["parameters"].items():
            if name in parameters and before["shape"] == parameters[name]["shape"]:
                prefix = f"{self.name}/state/{name}/"
                found |= {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        return found

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        saved = tree.join(plain, tensors)
        own = self.optimizer.state_dict()["param_groups"]
        if len(own) != len(saved["param_groups"]):
            raise ValueError(f"it has {len(saved['param_groups'])} parameter groups, not {len(own)}")
        # Settings that this release of the optimizer has added keep its own values.
        groups = [{**new, **old, "params": new["params"]} for new, old in zip(own, saved["param_groups"], strict=True)]
        indices = {name: index for index, name in self._names().items()}
        # Some optimizers keep values that belong to no parameter, under keys of their own, which stay as they are.
        state = {indices.get(key, key): value for key, value in saved["state"].items()}
        self._load({"state": state, "param_groups": groups}, plain)

    @override
    def restore_partly(self, plain: Any, tensors: Tensors) -> list[str]:
        saved = plain["state"]
        complete = {name for name in _keys(saved) if tree.tensor_names(saved[name]) <= tensors.keys()}
        names = self._names()
        state = {index: tree.join(saved[name], tensors) for index, name in names.items() if name in complete}
        self._load({**self.optimizer.state_dict(), "state": state}, plain)
        return sorted(f"{self.name}/state/{name}" for name in names.values() if name not in complete)

    @override
    def begin_anew(self) -> list[str]:
        return sorted(path for _, path in self._paths())

    def _load(self, state_dict: dict[str, Any], plain: Any) -> None:
        self.optimizer.load_state_dict(state_dict)
        names = self._names()
        self._keep_types({names[key]: state for key, state in state_dict["state"].items() if key in names}, plain)

    def _keep_types(self, saved: Mapping[str, Any], plain: Any) -> None:
        """Return to the types of the saved states: torch has cast them to the parameters', quantized numbers too.

        Floats follow a parameter that has another type than it had. ``saved`` has the states by names of parameters.
        """
        before, now, own = plain["parameters"], self._parameters(), self.optimizer.state
        for parameter, path in self._paths():
            name = path.partition("/state/")[2]
            if name in saved and parameter in own:
                same = name in before and before[name]["dtype"] == now[name]["dtype"]
                own[parameter] = _uncast(own[parameter], saved[name], floats=same)

    def _group_differences(self, plain: Any) -> list[str]:
        groups = self.collect()[0]["param_groups"]
        return group_differences(*([group["params"] for group in each] for each in (plain["param_groups"], groups)))

    def _parameters(self) -> dict[str, dict[str, Any]]:
        """Return the types and shapes of the whole parameters by name."""
        names = canonical_names(self.owner)
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return {
            names[each]: {"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)}
            for each in parameters
        }

    def _names(self) -> dict[int, str]:
        # By the number of the parameter in the optimizer's state.
        return {index: path.partition("/state/")[2] for index, (_, path) in enumerate(self._paths())}

    def _paths(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield the parameters, with the prefix of the names of their states' tensors."""
        names = canonical_names(self.owner)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, f"{self.name}/state/{names[parameter]}"


@dataclass(eq=False)
class ShardedOptimizerState(OptimizerState):
    """The state of an optimizer whose owner is sharded. A new optimizer takes an empty step for it."""

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        found = get_optimizer_state_dict(self.owner, self.optimizer)
        return tree.split(self.name, {**found, "parameters": self._parameters()})

    @override
    def differences(self, plain: Any, stored: Kinds, present: Kinds) -> list[str]:
        gone = parameter_differences(_keys(plain["state"]), _keys(self.collect()[0]["state"]))
        return [*self._group_differences(plain), *optimizer_differences(stored, present), *gone]

    @override
    def fitting(self, plain: Any, tensors: Tensors) -> dict[str, torch.Tensor]:
        return Tracked.fitting(self, plain, tensors)

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        options = StateDictOptions(strict=False)  # a parameter without a gradient has no state yet
        saved = tree.join({key: plain[key] for key in ("state", "param_groups")}, tensors)
        set_optimizer_state_dict(self.owner, self.optimizer, saved, options=options)
        self._keep_types(saved["state"], plain)

    @override
    def restore_partly(self, plain: Any, tensors: Tensors) -> list[str]:
        present = self.collect()[1]
        begun = {name.rpartition("/")[0] for name in present.keys() - tensors.keys()}
        _copy_in(present, {name: tensor for name, tensor in tensors.items() if name.rpartition("/")[0] not in begun})
        for parameter, path in self._paths():
            if path in begun:
                self.optimizer.state.pop(parameter, None)  # it begins with the parameter's next gradient
        return sorted(begun)


@dataclass(eq=False)
class OtherState(Tracked):
    """The state of any other object, which may differ between ranks."""

    value: Stateful

    @property
    @override
    def class_name(self) -> str | None:
        scheduler = unwrap_scheduler(self.value)
        return type(scheduler).__name__ if isinstance(scheduler, LRScheduler) else None

    @override
    def restore_partly(self, plain: Any, tensors: Tensors) -> list[str]:
        return [self.name]

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        plain, tensors = tree.split(self.name, self.value.state_dict())
        if sharded := next((name for name, tensor in tensors.items() if isinstance(tensor, DTensor)), None):
            raise UsageError(  # rank 0 alone saves it
                f"The state of {self.name!r} ({type(self.value).__name__}) holds a part of a sharded tensor, "
                f"{sharded!r}, of which rank 0 cannot save the others. Keep what follows sharded weights, such as "
                "their moving average, in a module, and track that."
            )
        return plain, tensors

    @override
    def common(self, tensors: Tensors) -> set[str]:
        return set()

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        self.value.load_state_dict(tree.join(plain, tensors))


def _own_names(canonical: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return a module's own names of its state by their canonical ones, in this order; none where they are not certain.

    Args:
        canonical: state by canonical names: torch leaves names without a wrapper's where they are, and moves others
            behind them, in their order.
        found: the same by the module's own names.
    """
    moved = iter([name for name in found if name not in canonical])
    names = {name: name if name in found else next(moved, name) for name in canonical}

    def same(name: str, own: str) -> bool:
        one, other = canonical[name], found.get(own)
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return name == own
        return one.shape == other.shape and one.data_ptr() == other.data_ptr()

    return names if all(same(*each) for each in names.items()) else {}


def _copy_in(present: Tensors, tensors: Tensors) -> list[str]:
    """Copy tensors into those with the same name, and return the names of the others."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in present and tensor is not present[name]:
                present[name].copy_(tensor)
    return sorted(present.keys() - tensors.keys())


def _uncast(loaded: Any, saved: Any, *, floats: bool) -> Any:
    """Return a loaded state of an optimizer with the saved tensors in place of those that were cast."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        keeps = loaded.dtype == saved.dtype or (saved.is_floating_point() and not floats)
        return loaded if keeps else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {
            key: _uncast(value, saved[key], floats=floats) if key in saved else value for key, value in loaded.items()
        }
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_uncast(*pair, floats=floats) for pair in zip(loaded, saved, strict=True))
    return loaded


def _keys(state: Any) -> set[str]:
    """Return the keys of an optimizer's state as JSON that are text: all, or names of parameters beside others."""
    if set(state) == {"$map"}:
        return {key for key, _ in state["$map"] if isinstance(key, str)}
    return set(state)


def copies_of(tensor: DTensor) -> int:
    """Return how many ranks hold each part of a sharded tensor: the product of the mesh's replicated dimensions."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def canonical_names(owner: nn.Module) -> Mapping[Any, str]:
    """Return the names of a module's parameters without the wrappers of data parallelism and compilation."""
    wrappers = sorted((name for name, each in owner.named_modules() if isinstance(each, DistributedDataParallel)),
                      key=len, reverse=True)  # fmt: skip
    # Inner wrappers come first: their names begin with those of outer ones, and match no more once these are removed.
    found = {}
    for name, parameter in owner.named_parameters():
        for wrapper in wrappers:
            prefix = f"{wrapper}." if wrapper else ""
            if name.startswith(f"{prefix}module."):
                name = prefix + name.removeprefix(f"{prefix}module.")  # noqa: PLW2901
        found[parameter] = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    return found


def settings_of(groups: Iterable[Mapping[str, Any]]) -> Any:
    """Return the settings of parameter groups as JSON; tensors of one element become numbers."""
    settings = [{key: _number(value) for key, value in group.items() if key != "params"} for group in groups]
    return [tree.split("", each)[0] for each in settings]


def restore_settings(groups: Sequence[dict[str, Any]], saved: Any) -> None:
    """Restore what :func:`settings_of` returned; tensors are overwritten in place.

    Raises:
        ValueError: the number of groups differs.
    """
    if len(groups) != len(saved):
        raise ValueError(f"it has {len(saved)} parameter groups, not {len(groups)}")
    for group, plain in zip(groups, saved, strict=True):
        for key, value in tree.join(plain, {}).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def owner_of(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module with all parameters of an optimizer, one of several modules if no single one has them.

    Returns:
        ``None`` if there are parameters that no module has.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owned = {name: wanted & set(map(id, module.parameters())) for name, module in modules.items()}
    if set().union(*owned.values()) != wanted:
        return None
    whole = next((name for name, found in owned.items() if found == wanted), None)
    if whole is not None:
        return modules[whole]
    joined = nn.Module()
    owners = {name: modules[name] for name, found in owned.items() if found}
    joined._modules.update(owners)  # noqa: SLF001 - add_module() refuses names of a module's own attributes
    return joined


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper; any other object is returned unchanged."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def unwrap_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside Accelerate's wrapper; any other object is returned unchanged."""
    return scheduler.scheduler if type(scheduler).__name__ == "AcceleratedScheduler" else scheduler
