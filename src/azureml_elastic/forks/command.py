"""The command line of the preload server, and the environment variables that its imports may not depend on.

**Environment variables that may differ between the imports and a worker without effect on the imports.** Libraries read
variables at import (``OMP_NUM_THREADS``) and keep the values. A worker forked after the imports must therefore have the
same environment, except for variables that are read later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from azureml_elastic.program.command import Program

__all__ = [
    "OUTERMOST",
    "READ_BY_TORCH",
    "changed",
    "changed_for_torch",
    "is_per_worker",
    "is_read_late",
    "lasting",
    "outermost",
    "plain_command",
    "replace_excluded",
    "server_command",
    "without_threads",
]


def outermost(package: str) -> str:
    """Return the code that runs a package's module ``server`` with ``-c``.

    Its ``serve`` returns only in children, with a function that runs the script, so this outermost frame is the only
    one below the script's. Its names are removed from ``__main__`` first, and the working directory from the path
    before any import.
    """
    return f"""\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from {package} import server as serving
try:
    serving.serve()()
except SystemExit:
    raise
except BaseException:
    __import__("sys").modules["azureml_elastic.forks.script_runner"].on_uncaught()
    raise
else:
    __import__("sys").modules["azureml_elastic.forks.script_runner"].on_end()
"""


OUTERMOST = outermost("azureml_elastic.forks")
"""Code that the preload server runs."""

_WAIT = "null"


def server_command(program: Program, descriptor: int) -> list[str]:
    """Return the command that starts the preload server of a program.

    Args:
        descriptor: descriptor of the server's end of the connection to the agent.
    """
    words = [*program.interpreter_command, "-c", OUTERMOST, str(descriptor), _WAIT]
    return [*words, program.kind, program.target, *program.arguments]


def replace_excluded(words: Sequence[str], excluded: Mapping[str, str]) -> list[str]:
    """Return the command of a preload server that imports less, and has the workers' environment already."""
    changed = list(words)
    changed[changed.index(OUTERMOST) + 2] = json.dumps(dict(excluded))
    return changed


def plain_command(words: Sequence[str]) -> list[str]:
    """Return the command of a plain start of the program, from the command of its preload server."""
    # Before it are the interpreter, its options and "-c"; behind it the descriptor, the excluded packages and the kind.
    position = list(words).index(OUTERMOST)
    module = ["-m"] if words[position + 3] == "module" else []
    return [*words[: position - 1], *module, *words[position + 4 :]]


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


def changed(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read at import."""
    names = {*imported_in, *wanted}
    return sorted(name for name in names if not is_read_late(name) and imported_in.get(name) != wanted.get(name))


def changed_for_torch(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read by torch's import."""
    return [name for name in changed(imported_in, wanted) if READ_BY_TORCH.match(name)]
