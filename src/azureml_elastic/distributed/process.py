"""Process group, device and settings of a worker, from the environment that torchrun or the agent sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
import torch.distributed as dist

from azureml_elastic.config import CheckpointPolicy, Plan
from azureml_elastic.config import environment as names
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.forks import freeze_inherited_garbage
from azureml_elastic.errors import PlanError, UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity

__all__ = ["WorkerEnvironment", "close_group", "open_group", "pick_device", "read_history", "trace_folder"]

_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_UNSUPPORTED = "unsupported gloo device"


@dataclass(frozen=True)
class WorkerEnvironment:
    """Settings of a worker in its environment.

    Args:
        identity: rank and round of this process.
        channel: path of the agent's socket, ``None`` without an agent.
        run_dir: folder for audit files, ``None`` for the working directory.
        plan: plan of the run, ``None`` without one.
        node: name of the node for file names.
    """

    identity: WorkerIdentity
    channel: str | None
    run_dir: str | None
    plan: Plan | None
    node: str

    @property
    def stays(self) -> bool:
        """Whether this process is to outlive rounds; the agent then sends its rank."""
        return self.channel is not None and self.identity.round == 0

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> WorkerEnvironment:
        """Return the settings in environment variables.

        Raises:
            PlanError: the plan cannot be read.
            UsageError: a value is not a number, or ``MASTER_ADDR`` or ``MASTER_PORT`` is missing beside ``WORLD_SIZE``.
        """
        identity = WorkerIdentity(
            rank=_number(variables, "RANK", 0),
            local_rank=_number(variables, "LOCAL_RANK", 0),
            world_size=_number(variables, "WORLD_SIZE", 1),
            round=_number(variables, names.ROUND, 0),
        )
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
        if identity.world_size > 1 and missing:
            raise UsageError(
                f"WORLD_SIZE={identity.world_size}, but {', '.join(missing)} is not set. Start the script with the "
                "node agent or torchrun, which set all of them, or unset WORLD_SIZE to run alone."
            )
        channel, text = variables.get(names.CHANNEL), variables.get(names.PLAN)
        if channel is not None and names.ROUND not in variables:
            raise PlanError(f"{names.CHANNEL} is set without {names.ROUND}; the node's agent sets both.")
        plan = None if text is None else Plan.from_json(text)
        node = variables.get(names.NODE_ID) or socket.gethostname()
        return cls(identity, channel, variables.get(names.RUN_DIR), plan, node)

    @property
    def max_world_size(self) -> int:
        """The largest number of ranks that the plan allows, 1 without a plan."""
        if self.plan is None:
            return 1
        count = self.plan.distribution.process_count_per_instance
        return self.plan.resources.max_instance_count * (1 if count == "auto" else count)

    def policy(self, wanted: CheckpointPolicy | None) -> CheckpointPolicy:
        """Return the checkpoint policy: that of the plan, updated with the fields that are set in ``wanted``.

        The default path is ``checkpoints`` in the run's folder, or in the working directory.
        """
        chosen = CheckpointPolicy() if self.plan is None else self.plan.checkpoint
        if wanted is not None:
            given = {name: getattr(wanted, name) for name in wanted.model_fields_set}
            chosen = CheckpointPolicy.model_validate({**dict(chosen), **given})
        if chosen.path is not None:
            return chosen
        return chosen.model_copy(update={"path": os.path.join(self.run_dir or ".", "checkpoints")})  # noqa: PTH118


def read_history(variables: Mapping[str, str] = os.environ) -> tuple[int, float]:
    """Return the number of losses and the seconds of training of the run before this round."""
    losses, _, seconds = variables.get(names.HISTORY, "0 0").partition(" ")
    return int(losses), float(seconds)


def trace_folder(wanted: str | None, run_dir: str | None, variables: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for the profiler's traces: a path with ``$`` variables, or ``profiles`` in the run's folder."""
    return Path(run_dir or ".") / "profiles" if wanted is None else Path(Template(wanted).safe_substitute(variables))


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{name}={text!r} is not a whole number; the node agent or torchrun sets it.") from error


def pick_device(identity: WorkerIdentity) -> torch.device:
    """Return this process's GPU, or the CPU where there is none.

    Raises:
        UsageError: the node has fewer GPUs than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if identity.local_rank >= count:
        raise UsageError(
            f"LOCAL_RANK={identity.local_rank}, but this node has {count} GPUs. Lower process_count_per_instance to "
            f"{count}."
        )
    device = torch.device("cuda", identity.local_rank)
    torch.cuda.set_device(device)
    return device


def open_group(identity: WorkerIdentity, device: torch.device) -> bool:
    """Join the process group, unless the script has; return whether this call has, so that the caller must leave it."""
    freeze_inherited_garbage()
    if dist.is_initialized():
        return False
    kind = device_of(device)
    if names.CHANNEL in os.environ:  # else nobody interrupts this process, and torch's watchdog is what ends a hang
        kind.keep_watchdog_out()
    try:
        _open(kind.backend, identity)
    except RuntimeError as error:
        transport = os.environ.get(_TRANSPORT)
        if transport is None or _UNSUPPORTED not in str(error):
            raise
        raise UsageError(
            f"{_TRANSPORT}={transport} is not supported by the gloo of this torch ({torch.__version__}), which was "
            "built without it. Use another build of torch, or remove the variable: gloo then sends in clear; see "
            "docs/explanation/security.md."
        ) from error
    return True


def _open(backend: str, identity: WorkerIdentity) -> None:
    # The number of groups is part of the keys under which ranks find each other. One that could not be opened, because
    # a rank was lost meanwhile, has been counted on the ranks that tried.
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - destroy_process_group() needs a group
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ and "RANK" in os.environ:
        dist.init_process_group(backend, rank=identity.rank, world_size=identity.world_size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def close_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
