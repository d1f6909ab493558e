"""Environment variables that may differ between the imports and a worker without effect on the imports.

Libraries read variables at import (``OMP_NUM_THREADS``) and keep the values. A worker forked after the imports must
therefore have the same environment, except for variables that are read later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PER_WORKER = re.compile(
    r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|"
    r"AZUREML_ELASTIC_(HISTORY|ROUND|WORKER)"
)
"""Variables that this library, or torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html), sets for each
worker."""

_READ_LATE = re.compile(
    r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING)|CUBLAS_WORKSPACE_CONFIG|"
    r"(GLOO|NCCL|TORCH_NCCL|UCX)_.*"
)
"""Read when a GPU or a process group is opened, which no import may do (see :mod:`.import_loader`)."""

READ_BY_TORCH = re.compile(
    r"(ATEN|BLIS|CUDA|DNNL|GOMP|GOTO|KMP|LD|MALLOC|MKL|NPY|OMP|ONEDNN|OPENBLAS)_|NUMPY|PYTHON|PYTORCH|TORCH|TRITON"
)
"""Beginnings of the environment variables that torch, numpy or their libraries may read at import."""

_READ_EARLY = re.compile(READ_BY_TORCH.pattern + "|(ACCELERATE|DS|HF|LC|TRANSFORMERS)_|LANG")
"""Beginnings of those that may be read when the interpreter starts or a library is imported."""

_ARROW_OPTIONS = "JE_ARROW_MALLOC_CONF"
"""Options of the memory allocator in pyarrow."""


def is_per_worker(name: str) -> bool:
    """Return whether a variable belongs to a single worker, and so is unset during the imports."""
    return _PER_WORKER.fullmatch(name) is not None


def is_read_late(name: str) -> bool:
    """Return whether a variable may be set after the imports."""
    return is_per_worker(name) or _READ_LATE.fullmatch(name) is not None


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables shared by all workers of a node in all rounds."""
    return {name: value for name, value in environ.items() if not is_per_worker(name)}


def without_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the imports, with those that keep libraries from starting threads.

    Arrow's copy of jemalloc starts one when it is loaded, also by pandas and scikit-learn, which no fork survives. See
    ``background_thread`` in https://jemalloc.net/jemalloc.3.html.
    """
    options = [option for option in environ.get(_ARROW_OPTIONS, "").split(",") if option]
    if not any(option.startswith("background_thread:") for option in options):
        options.append("background_thread:false")
    return {**environ, _ARROW_OPTIONS: ",".join(options)}


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changed variables with their new values, ``None`` for removed ones."""
    return {name: after.get(name) for name in sorted({*before, *after}) if before.get(name) != after.get(name)}


def changed(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read at import."""
    return [name for name in difference(imported_in, wanted) if not is_read_late(name)]


def read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read when the interpreter starts or a library is imported."""
    return {name: value for name, value in environ.items() if _READ_EARLY.match(name) and not is_read_late(name)}
