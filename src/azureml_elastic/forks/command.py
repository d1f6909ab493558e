"""The command line of a fork server, and the environment variables that its imports may not depend on.

**Environment variables that may differ between the imports and a worker without effect on the imports.** Libraries read
variables at import (``OMP_NUM_THREADS``) and keep the values. A worker forked after the imports must therefore have the
same environment, except for variables that are read later.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from azureml_elastic.program.command import Program

INTERPRETER = (sys.executable, "-u", "-c")
"""Beginning of a server's command, unless its program has an interpreter or options of its own."""

OUTERMOST = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from azureml_elastic.forks import server as serving
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
"""Code that a server runs. ``serve`` returns only in forks, with a function that runs the script, so this outermost
frame is the only one below the script's. Its names are removed from ``__main__`` first, and the working directory from
the path before any import."""


@dataclass(frozen=True)
class Imports:
    """What a server imports.

    Args:
        program: program whose imports are made, and which the server's workers run; ``None`` for no program.
        modules: further modules, which are imported after those of the program.
        path: folders in which the further modules are searched, too.
        at_once: whether all is imported before the first fork, also what torch imports in its first steps, so that
            forks become nodes with preload servers of their own.
    """

    program: Program | None = None
    modules: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    at_once: bool = False

    @classmethod
    def from_json(cls, text: str) -> Imports:
        """Read what :func:`server_command` has written."""
        fields = json.loads(text)
        program = fields.pop("program")
        if program is not None:
            program = Program(**{name: _tuple(value) for name, value in program.items()})
        return cls(program, **{name: _tuple(value) for name, value in fields.items()})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def server_command(imports: Imports, descriptor: int, *, begins: bool = True) -> list[str]:
    """Return the command that starts a server.

    Args:
        descriptor: descriptor of the server's end of the link.
        begins: whether the environment is that of the workers; else it is sent later.
    """
    interpreter = INTERPRETER if imports.program is None else (*imports.program.interpreter_command, "-c")
    excluded = "{}" if begins else "null"  # packages that are left to the workers, with the reasons
    return [*interpreter, OUTERMOST, str(descriptor), json.dumps(asdict(imports)), excluded]


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


def changed(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read at import."""
    names = {*imported_in, *wanted}
    return sorted(name for name in names if not is_read_late(name) and imported_in.get(name) != wanted.get(name))


def changed_for_torch(imported_in: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ and may have been read by torch's import."""
    return [name for name in changed(imported_in, wanted) if READ_BY_TORCH.match(name)]


def read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read when the interpreter starts or a library is imported."""
    return {name: value for name, value in environ.items() if _READ_EARLY.match(name) and not is_read_late(name)}
