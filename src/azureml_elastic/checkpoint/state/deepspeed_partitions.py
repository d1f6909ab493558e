"""Location of the data of each parameter in DeepSpeed, at each stage of ZeRO.

At stages 1 and 2 the parameters of each group are concatenated in one flat tensor that is cut into as many partitions
as there are ranks; a parameter may span several of them. At stage 3 each parameter is padded and cut into equal parts;
the parts of a rank are concatenated in several flat tensors. Without ZeRO each rank has all. In every case the
optimizer steps on flat tensors of 32-bit numbers, which its state belongs to.

These attributes are private to DeepSpeed, and tested with the oldest and the newest supported release.
Source: ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
``deepspeed/runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from azureml_elastic.errors import UsageError


@dataclass(frozen=True)
class Slot:
    """Location of a parameter of the optimizer on this rank.

    Args:
        key: tensor that the optimizer steps on, the key of its state: the parameter itself without ZeRO, else float32
            (elements of several parameters on this rank,).
        offset: index of the parameter's first element in the flattened key.
        start: index of that element in the flattened parameter.
        count: number of elements; 0 where this rank has none of the parameter.
    """

    key: torch.Tensor
    offset: int
    start: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of the parameter, a view of shape (count,), in a tensor that is laid out like the key."""
        return flat.detach().view(-1).narrow(0, self.offset, self.count)


@dataclass
class Partitions(ABC):
    """The parts of parameters on this rank, which an optimizer of DeepSpeed holds."""

    zero: Any

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that steps."""
        base: Optimizer = self.zero.optimizer
        return base

    @abstractmethod
    def slots(self) -> Iterator[tuple[torch.nn.Parameter, Slot]]:
        """Yield all parameters of the optimizer, including those without elements on this rank."""

    def rest(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int]:
        """Return this rank's elements, (count,), of a parameter without optimizer, and the index of the first."""
        return parameter.detach().view(-1), 0

    @abstractmethod
    def changing(self) -> AbstractContextManager[None]:
        """Context in which the parts may change; at its end they are copied to the model. A collective."""


class Whole(Partitions):
    """Without ZeRO and mixed precision: the optimizer steps on the parameters."""

    @property
    @override
    def optimizer(self) -> Optimizer:
        base: Optimizer = self.zero  # not wrapped
        return base

    @override
    def slots(self) -> Iterator[tuple[torch.nn.Parameter, Slot]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, Slot(parameter, 0, 0, parameter.numel())

    @override
    def changing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # the parts are the parameters of the model


class Cut(Partitions):
    """Stages 1 and 2, and the optimizer for bfloat16 with 32-bit gradients of stage 1."""

    @property
    def _groups(self) -> list[tuple[list[torch.nn.Parameter], torch.Tensor]]:
        zero = self.zero
        if hasattr(zero, "bf16_groups"):
            return list(zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True))
        return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))

    @override
    def slots(self) -> Iterator[tuple[torch.nn.Parameter, Slot]]:
        for parameters, flat in self._groups:
            for parameter in parameters:
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # noqa: SLF001
                if mapping is None:
                    yield parameter, Slot(flat, 0, 0, 0)
                else:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield parameter, Slot(flat, there.start, here.start, here.numel)

    @override
    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        zero = self.zero
        yield
        zero.update_lp_params()  # converts to the type of the model, and gathers from all ranks
        if all(self.optimizer.state.get(flat) for _, flat in self._groups):
            zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001 - refreshes DeepSpeed's view of the parameters


class Scattered(Partitions):
    """Stage 3."""

    @override
    def slots(self) -> Iterator[tuple[torch.nn.Parameter, Slot]]:
        zero = self.zero
        for parameters in zero.fp16_groups:
            for parameter in parameters:
                group, offset, part = zero.grad_position[zero.get_param_id(parameter)]
                start, count = self._extent(parameter, part)
                yield parameter, Slot(zero.fp32_partitioned_groups_flat[group], offset, start, count)

    @override
    def rest(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int]:
        part = parameter.ds_tensor.detach().view(-1)  # type: ignore[attr-defined]
        start, count = self._extent(parameter, part.numel())
        return part.narrow(0, 0, count), start

    @override
    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        zero = self.zero
        zero.checkpoint_event_prologue()  # drops gathered copies of small parameters
        yield
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
            zero._unflatten_partitioned_parameters(index)  # noqa: SLF001
        for parameter in zero.persistent_parameters:
            # One by one: of several, DeepSpeed waits for the last alone, and on the CPU the others may complete later.
            parameter.all_gather([parameter])

    def _extent(self, parameter: Any, part: int) -> tuple[int, int]:
        rank = torch.distributed.get_rank(self.zero.dp_process_group)
        start = min(rank * part, parameter.ds_numel)
        return start, min(part, parameter.ds_numel - start)


def partitions_of(engine: Any) -> Partitions:
    """Return the parts of an engine's parameters.

    Raises:
        UsageError: it has no optimizer, or features whose state cannot be restored at another world size.
    """
    problem = _problem(engine)
    if problem is not None:
        raise UsageError(
            f"The DeepSpeed engine cannot be tracked: {problem}. Supported are ZeRO stages 1, 2 and 3 with data "
            "parallelism alone, their offloading to the CPU included, and stage 0 in 32 bits."
        )
    kind = _kind(engine.optimizer)
    assert kind is not None
    return kind(engine.optimizer)


def _kind(optimizer: Any) -> type[Partitions] | None:
    # By the attributes that are used here: the classes have several names, and DeepSpeed need not be installed.
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Scattered
    if hasattr(optimizer, "single_partition_of_fp32_groups") or hasattr(optimizer, "fp32_groups_flat_partition"):
        return Cut
    return Whole if isinstance(optimizer, Optimizer) else None


def size_of(parameter: Any) -> torch.Size:
    """Return the size of a parameter, which may be partitioned."""
    size: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return size


def _problem(engine: Any) -> str | None:
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
        return "it has no optimizer"
    settings = engine._config.zero_config  # noqa: SLF001
    unsupported = {
        "it is a pipeline": bool(engine.pipeline_parallelism),
        "it has layers of experts": bool(engine.has_moe_layers),
        "it uses tensor or sequence parallelism": engine.dp_world_size != torch.distributed.get_world_size(),
        "random layer-token drop keeps a state of its own": _enabled(engine, "random_ltd_enabled"),
        "curriculum learning keeps a state of its own": _enabled(engine, "curriculum_learning_enabled"),
        "it offloads to NVMe": bool(
            getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False)
        ),
        "it keeps secondary partitions (hpZ)": getattr(settings, "zero_hpz_partition_size", 1) > 1,
        "it scatters over a part of the ranks (MiCS)": getattr(settings, "mics_shard_size", 0) > 0,
        "it offloads a part of the optimizer (ratio below 1)": getattr(optimizer, "partial_offload", 1.0) != 1.0,
        "its optimizer is in another process (SuperOffload)": hasattr(optimizer, "superoffload_cpu_optimizer"),
        "progressive layer drop keeps a state of its own": _enabled(engine, "pld_enabled"),
        "compression keeps a state of its own": bool(_compression(engine)),
        "its parameters are not contiguous": isinstance(optimizer, Optimizer)
        and not all(each.is_contiguous() for each in engine.module.parameters()),
        "it overlaps optimizer steps with later ones (ZenFlow)": bool(getattr(optimizer, "zenflow", False)),
    }
    unsupported[f"{type(optimizer).__name__} keeps its state in another way; take ZeRO stage 1"] = not _kind(optimizer)
    return next((what for what, found in unsupported.items() if found), None)


def _enabled(engine: Any, what: str) -> bool:
    """Return a flag of the engine, false in releases without it."""
    return bool(getattr(engine, what, lambda: False)())


def _compression(engine: Any) -> bool:
    settings = getattr(engine._config, "compression_config", None) or {}  # noqa: SLF001
    shared = (each.get("shared_parameters", {}) for each in settings.values() if isinstance(each, dict))
    return any(each.get("enabled", False) for each in shared if isinstance(each, dict))
