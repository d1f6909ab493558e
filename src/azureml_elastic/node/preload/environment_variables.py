"""Environment variables that may differ between the imports and a worker without effect on the imports.

Libraries read variables at import (``OMP_NUM_THREADS``) and keep the values. A worker forked after the imports must
therefore have the same environment, except for variables that are read later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["changed", "is_per_worker", "is_read_late", "lasting"]

_PER_WORKER = re.compile(
    r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|"
    r"AZUREML_ELASTIC_(HISTORY|ROUND)"
)
"""Variables that this library, or torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html), sets for each
worker."""

_READ_LATE = re.compile(
    r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING)|CUBLAS_WORKSPACE_CONFIG|"
    r"(GLOO|NCCL|TORCH_NCCL|UCX)_.*"
)
"""Read when a GPU or a process group is opened, which no import may do (see :mod:`.fork_safety`)."""


def is_per_worker(name: str) -> bool:
    """Return whether a variable belongs to a single worker, and so is unset during the imports."""
    return _PER_WORKER.fullmatch(name) is not None


def is_read_late(name: str) -> bool:
    """Return whether a variable may be set after the imports."""
    return is_per_worker(name) or _READ_LATE.fullmatch(name) is not None


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables shared by all workers of a node in all rounds."""
    return {name: value for name, value in environ.items() if not is_per_worker(name)}


def changed(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read at import."""
    names = {*imported_in, *wanted}
    return sorted(name for name in names if not is_read_late(name) and imported_in.get(name) != wanted.get(name))
