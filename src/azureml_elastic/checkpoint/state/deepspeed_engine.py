"""The state of a DeepSpeed engine: saved at one world size and stage, restored at any other.

DeepSpeed's own checkpoints depend on the number of ranks and the stage. Here every rank saves its data as parts of
parameters, which need no conversion. Saved are the parameters, in the optimizer's 32 bits or in their own type where
the optimizer does not have them (such as frozen ones), the state of the optimizer, buffers, the loss scaler, the
scheduler, and the engine's counters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer
from typing_extensions import Self, override

from azureml_elastic.checkpoint.format.manifest import FLAT
from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.state.deepspeed_partitions import Slot, Whole, partitions_of, size_of
from azureml_elastic.checkpoint.state.tracked import Tensors, Tracked, restore_settings, settings_of
from azureml_elastic.errors import UsageError

_LOG = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Fragment(torch.Tensor):
    """A tensor, (total,), of which this rank holds a range of elements, which may be empty.

    It has the size of the whole tensor but no memory of its own, and does not support computations. Its protocol is
    that of the planners of ``torch.distributed.checkpoint`` (``torch/distributed/_checkpointable.py``).

    Args:
        held: elements of this rank, (count,), a flat view of the live memory.
        start: index of the first of them in the whole tensor.
    """

    held: torch.Tensor
    start: int

    def __new__(cls, held: torch.Tensor, start: int, total: int) -> Self:
        """Return a tensor of shape (total,), and of the type and device of what is held, without memory."""
        whole: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, (total,), dtype=held.dtype, device=held.device
        )
        whole.held, whole.start = held, start
        return whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.held.numel() and self.numel():
            return []
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.held.numel()]))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([self.numel()])),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.held

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{operation} is not supported on a Fragment, whose other elements are on other ranks")


def is_engine(value: Any) -> bool:
    """Return whether this is a DeepSpeed engine, without importing DeepSpeed."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(value).__mro__)


@dataclass(eq=False)
class EngineState(Tracked):
    """The state of a DeepSpeed engine.

    Raises:
        UsageError: the engine uses features whose state cannot be saved.
    """

    replicated: bool = field(default=False, init=False)
    engine: Any

    def __post_init__(self) -> None:
        self._partitions = partitions_of(self.engine)
        self._names = {parameter: key for key, parameter in self.engine.module.named_parameters()}
        self._sizes = {name: size_of(parameter) for parameter, name in self._names.items()}

    @staticmethod
    def parts(engine: Any) -> list[Any]:
        """Return the objects whose state belongs to the engine."""
        found = [engine.module, engine.optimizer, getattr(engine.optimizer, "optimizer", None), engine.lr_scheduler]
        return [part for part in found if part is not None]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the engine."""
        return self._partitions.optimizer

    def accumulate(self, *, last: bool) -> None:
        """Set before a forward pass whether it is the last one of an optimizer step.

        Raises:
            UsageError: the configuration or the release of DeepSpeed does not support several passes.
        """
        if not last and self.engine._config.gradient_accumulation_steps == 1:  # noqa: SLF001
            raise UsageError(
                "gradient_accumulation_steps is 1, but a step has several micro-batches. Give run.deepspeed_config() "
                "the loader's micro_batch_size, and take what it returns."
            )
        if not last and _loses_gradients(self.engine.optimizer):
            raise UsageError(
                "This release of DeepSpeed loses gradients where it accumulates them over more than two micro-batches "
                "and offloads the optimizer at stage 1 or 2. Update it (0.19.8 does not), or leave out one of both."
            )
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a weighted loss, ()."""
        self.engine.backward(loss, scale_wrt_gas=False)

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        engine = self.engine
        counted = engine._is_gradient_accumulation_boundary is None  # noqa: SLF001 - else the loop sets it
        if counted and engine.micro_steps % engine.gradient_accumulation_steps():
            raise UsageError(
                f"A checkpoint was due after {engine.micro_steps} batches, in the middle of "
                f"{engine.gradient_accumulation_steps()} that are accumulated. Call run.commit() after the last one."
            )
        slots = self._slots()
        self._require_state(slots)
        tensors, state = dict(self._parameters(slots)), {}
        for name, slot in slots.items():
            flats, numbers = self._kept(name, slot)
            for key, flat in flats.items():
                whole = self._sizes[name].numel()
                tensors[f"{self.name}/optimizer/{name}/{key}"] = Fragment(slot.of(flat), slot.start, whole)
            state[name] = {"tensors": {key: str(flat.dtype) for key, flat in flats.items()}, "numbers": numbers}
        plain, others = tree.split(self.name, self._others())
        plain["parameters"] = {
            name: {FLAT: [f"{self.name}/parameters/{name}", list(size)]} for name, size in self._sizes.items()
        }
        plain["optimizer"] = {"groups": settings_of(self._groups), "state": state}
        return plain, {**tensors, **others}

    @override
    def common(self, tensors: Tensors) -> set[str]:
        return {key for key, tensor in tensors.items() if isinstance(tensor, Fragment)}

    @override
    def targets(self, plain: Any) -> dict[str, torch.Tensor]:
        saved = {name: torch.Size(each[FLAT][1]) for name, each in plain["parameters"].items()}
        if saved != self._sizes:
            differing = {name for name, _ in saved.items() ^ self._sizes.items()}
            raise ValueError(f"it differs in {len(differing)} parameters, such as {min(differing)!r}")
        for name, slot in self._slots().items():
            state, wanted = self.optimizer.state[slot.key], plain["optimizer"]["state"][name]["tensors"]
            # State that the checkpoint does not have is gone after the restore, too.
            for key in [key for key, value in state.items() if _is_like(slot, key, value) and key not in wanted]:
                del state[key]
            for key, kind in wanted.items():  # the state of a new optimizer is missing
                if not _is_like(slot, key, state.get(key)):
                    dtype = getattr(torch, kind.removeprefix("torch."))
                    state[key] = torch.zeros_like(slot.key, dtype=dtype, requires_grad=False)
        return self.collect()[1]

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        with self._partitions.changing():
            for name, own in self.collect()[1].items():
                found = tensors.get(name)
                if isinstance(own, Fragment) and not isinstance(found, Fragment):  # saved with another type
                    if found is None:
                        raise ValueError(f"it has no {name!r}")
                    own.held.copy_(found.narrow(0, own.start, own.held.numel()))
            restore_settings(self._groups, plain["optimizer"]["groups"])
            on_device = any(group.get("fused") or group.get("capturable") for group in self._groups)  # as in torch
            for name, slot in self._slots().items():
                numbers = plain["optimizer"]["state"][name]["numbers"]
                device = slot.key.device if on_device else torch.device("cpu")
                state = {key: _number(value, device) for key, value in numbers.items()}
                self.optimizer.state[slot.key].update(state)
        self._restore_others({key: tree.join(plain[key], tensors) for key in self._others()})

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _slots(self) -> dict[str, Slot]:
        return {self._names[parameter]: slot for parameter, slot in self._partitions.slots()}

    def _parameters(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, name in self._names.items():
            slot = slots.get(name)
            held, start = self._partitions.rest(parameter) if slot is None else (slot.of(slot.key), slot.start)
            yield f"{self.name}/parameters/{name}", Fragment(held, start, self._sizes[name].numel())

    def _require_state(self, slots: Mapping[str, Slot]) -> None:
        """Check that the state of the optimizer is found for all parameters, whatever the release and the settings."""
        without = [name for name, slot in slots.items() if not self.optimizer.state.get(slot.key)]
        # Without ZeRO a parameter that never had a gradient has no state; a flat part of all always has a gradient.
        if without and len(without) < len(slots) and not isinstance(self._partitions, Whole):
            raise UsageError(
                f"{type(self.optimizer).__name__} keeps a state for {len(slots) - len(without)} parameters, but none "
                f"for {len(without)}, such as {without[0]!r}: DeepSpeed has it elsewhere, where it is not saved from."
            )

    def _kept(self, name: str, slot: Slot) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the optimizer's state for the flat tensor of a parameter: tensors of the key's shape, and numbers."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for key, value in self.optimizer.state.get(slot.key, {}).items():
            if _is_like(slot, key, value):
                tensors[key] = value
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                numbers[key] = [value.item(), str(value.dtype), list(value.shape)]
            elif value is None or isinstance(value, bool | int | float | str):
                numbers[key] = [value, None, None]
            else:
                raise UsageError(
                    f"{type(self.optimizer).__name__} keeps {key}={type(value).__name__} for {name!r}; of an optimizer "
                    "in DeepSpeed only numbers and tensors of the parameter's size can be saved."
                )
        return tensors, numbers

    def _others(self) -> dict[str, Any]:
        engine = self.engine
        scaler, grad_scaler = _scalers(engine)
        return {
            "buffers": dict(_buffers(engine.module)),
            "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
            # DeepSpeed's loss scalers have no state_dict: all of their state are plain numbers.
            "loss_scaler": None
            if scaler is None
            else {
                "kind": type(scaler).__name__,
                "values": {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)},
            },
            "grad_scaler": None if grad_scaler is None else grad_scaler.state_dict(),
            "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        }

    def _restore_others(self, found: Mapping[str, Any]) -> None:
        engine = self.engine
        for name, buffer in _buffers(engine.module):
            if found["buffers"][name] is not buffer:
                buffer.copy_(found["buffers"][name])
        for name, count in found["counters"].items():
            setattr(engine, name, count)
        scaler, grad_scaler = _scalers(engine)
        _restore_scaler(scaler, found["loss_scaler"])
        if grad_scaler is not None and found["grad_scaler"] is not None:
            grad_scaler.load_state_dict(found["grad_scaler"])
        if (engine.lr_scheduler is None) != (found["scheduler"] is None):
            raise ValueError(f"it has {'no' if found['scheduler'] is None else 'a'} scheduler")
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(found["scheduler"])


def _is_like(slot: Slot, key: str, value: Any) -> bool:
    """Return whether a value of the optimizer's state is laid out like the tensor that it steps on."""
    # The step has no dimensions, as a parameter has none without ZeRO if it is a scalar.
    return isinstance(value, torch.Tensor) and value.shape == slot.key.shape and key != "step"


def _number(saved: list[Any], device: torch.device) -> Any:
    value, kind, shape = saved
    if kind is None:
        return value
    return torch.full(shape or [], value, dtype=getattr(torch, kind.removeprefix("torch.")), device=device)


def _buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in root.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield f"{prefix}.{name}" if prefix else name, buffer


def _scalers(engine: Any) -> tuple[Any, Any]:
    # Of DeepSpeed, and of torch.
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None), getattr(optimizer, "torch_autocast_gradscaler", None)


def _restore_scaler(scaler: Any, saved: Mapping[str, Any] | None) -> None:
    if scaler is None or saved is None or type(scaler).__name__ != saved["kind"]:
        if scaler is not None and scaler.dynamic:
            _LOG.warning("The checkpoint has no state of a %s: the loss scale starts anew.", type(scaler).__name__)
        return
    for key, value in saved["values"].items():
        setattr(scaler, key, value)


def _loses_gradients(optimizer: Any) -> bool:
    """Return whether gradients accumulated in CPU memory are not written back, as in releases up to at least 0.17.6."""
    stages_1_and_2 = type(optimizer).__name__ == "DeepSpeedZeroOptimizer"
    return stages_1_and_2 and bool(optimizer.cpu_offload) and not hasattr(optimizer, "_record_offload_copy")
