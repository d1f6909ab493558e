"""Environment variables that may differ between the imports and a worker without effect on the imports.

Libraries read variables at import (``OMP_NUM_THREADS``) and keep the values. A worker forked after the imports must
therefore have the same environment, except for variables that are read later.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["changed", "is_per_worker", "is_read_late", "lasting"]

_PER_WORKER = frozenset(
    {
        "AZUREML_ELASTIC_HISTORY",
        "AZUREML_ELASTIC_ROUND",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)
"""What this library sets for each worker, and what torchrun documents that it does
(https://docs.pytorch.org/docs/stable/elastic/run.html)."""

_PER_WORKER_FAMILIES = ("TORCHELASTIC_",)

_READ_LATE = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    }
)
_READ_LATE_FAMILIES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_")
"""Read when a GPU or a process group is opened, which no import may do (see :mod:`.safety`)."""


def is_per_worker(name: str) -> bool:
    """Return whether a variable belongs to a single worker, and so is unset during the imports."""
    return name in _PER_WORKER or name.startswith(_PER_WORKER_FAMILIES)


def is_read_late(name: str) -> bool:
    """Return whether a variable may be set after the imports."""
    return is_per_worker(name) or name in _READ_LATE or name.startswith(_READ_LATE_FAMILIES)


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables shared by all workers of a node in all rounds."""
    return {name: value for name, value in environ.items() if not is_per_worker(name)}


def changed(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read at import."""
    names = {*imported_in, *wanted}
    return sorted(name for name in names if not is_read_late(name) and imported_in.get(name) != wanted.get(name))
