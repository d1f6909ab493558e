"""Process group, device and settings of a worker, from the environment that torchrun or the agent sets.

**Forked processes do not collect the garbage of their parent.** An unused process group is part of a reference cycle
with its model or session. If a forked data worker collects it, gloo joins threads that exist in the parent only: a
segmentation fault. Hence no garbage is collected during a fork, and inherited objects never are in the child
(``gc.freeze``), which also keeps their memory shared. New objects of the child are collected as usual.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from azureml_elastic.config import CheckpointPolicy, Plan
from azureml_elastic.distributed.device import device_of
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity


class _Forks:
    """State of the garbage collector around forks and blocks, which may overlap on several threads."""

    def __init__(self) -> None:
        self._lock, self._depth, self._enabled = threading.RLock(), 0, False
        os.register_at_fork(before=self.__enter__, after_in_parent=self.__exit__, after_in_child=self.in_child)

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._enabled:
                gc.enable()

    def in_child(self) -> None:
        self._lock, self._depth = threading.RLock(), 0  # another thread of the parent may hold the old lock
        gc.freeze()
        if self._enabled:
            gc.enable()


without_collection = functools.cache(_Forks)
"""A context in which no thread of this process collects garbage."""


def freeze_inherited_garbage() -> None:
    """Exclude inherited objects from garbage collection in all children forked from now on. Idempotent."""
    without_collection()  # referenced by its callbacks


@dataclass(frozen=True)
class WorkerSettings:
    """The environment of a worker, and what follows from it at its start."""

    environment: WorkerEnvironment
    identity: WorkerIdentity
    plan: Plan | None

    @property
    def stays(self) -> bool:
        """Whether this process is to outlive rounds; the agent then sends its rank."""
        return self.environment.channel is not None and self.identity.round == 0

    @classmethod
    def of(cls, environment: WorkerEnvironment) -> WorkerSettings:
        """Return the settings in an environment.

        Raises:
            PlanError: the plan cannot be read.
            UsageError: a value is not a number, or ``MASTER_ADDR`` or ``MASTER_PORT`` is missing beside ``WORLD_SIZE``.
        """
        environment.check()
        identity = WorkerIdentity(
            rank=environment.rank,
            local_rank=environment.local_rank,
            world_size=environment.world_size,
            round=environment.round,
        )
        plan = None if environment.plan is None else Plan.from_json(environment.plan)
        return cls(environment, identity, plan)

    @property
    def max_world_size(self) -> int:
        """The number of ranks of a run with all nodes that the plan allows."""
        return (self.plan.resources.max_instance_count if self.plan else 1) * self.environment.local_world_size

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
        return chosen.model_copy(update={"path": os.path.join(self.environment.run_dir or ".", "checkpoints")})  # noqa: PTH118


def trace_folder(wanted: str | None, environment: WorkerEnvironment) -> Path:
    """Return the folder for the profiler's traces: a path with ``$`` variables, or ``profiles`` in the run's folder."""
    return Path(environment.run_dir or ".") / "profiles" if wanted is None else Path(environment.expand(wanted))


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
    freeze_inherited_garbage()  # before the first group, whose threads a forked process does not have
    if dist.is_initialized():
        return False
    kind, environment = device_of(device), WorkerEnvironment.read()
    if environment.channel is not None:  # else nobody interrupts this process: torch's watchdog is what ends a hang
        kind.keep_watchdog_out()
    try:
        _open(kind.backend, identity)
    except RuntimeError as error:
        transport = environment.gloo_transport
        if transport is None or "unsupported gloo device" not in str(error):
            raise
        raise UsageError(
            f"GLOO_DEVICE_TRANSPORT={transport} is not supported by the gloo of this torch "
            f"({torch.__version__}), which was built without it. Use another build of torch, or remove the variable: "
            "gloo then sends in clear; see docs/explanation/security.md."
        ) from error
    return True


def _open(backend: str, identity: WorkerIdentity) -> None:
    # The number of groups is part of the keys under which ranks find each other. One that could not be opened, because
    # a rank was lost meanwhile, has been counted on the ranks that tried.
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - destroy_process_group() needs a group
    if WorkerEnvironment.read().finds_others:
        dist.init_process_group(backend, rank=identity.rank, world_size=identity.world_size)
    else:  # alone, where no port is opened and no address needed
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def close_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.distributed_c10d.destroy_process_group()  # not by the name that finishes a stack's session first
