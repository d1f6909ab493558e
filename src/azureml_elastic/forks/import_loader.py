"""Imports of the preload server, made as the script would make them.

Output of the imports and their changes of the environment are recorded, for each worker to repeat. A package is left
to the workers if its import reads ``RANK`` or another variable of a single worker for more than logging, or starts
threads that a fork would not copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from azureml_elastic.forks.fork_checks import end_with, native_threads, trial_fork
from azureml_elastic.forks.import_scan import SESSION, Import
from azureml_elastic.forks.import_variables import is_per_worker

_READERS = frozenset(
    {f"{fabric}.utilities.rank_zero" for fabric in ("lightning.fabric", "lightning_fabric")}
    | {"torchmetrics.utilities.prints"}
)
"""Modules whose import reads the rank, and keeps it for nothing but the choice of the process that logs. They are
imported all the same, and each worker sets its own rank after the fork."""

_RANKS = {"lightning_utilities.core.rank_zero": "RANK", "torchmetrics.utilities.prints": "LOCAL_RANK"}
"""Variable of the rank that the function ``rank_zero_only`` of a module has as an attribute: see
``lightning_utilities/core/rank_zero.py`` and ``torchmetrics/utilities/prints.py``."""

_BETWEEN = frozenset({"os", "collections.abc"})


def reads_rank_only(reader: FrameType | None) -> bool:
    """Return whether a variable is read by a module that keeps only its rank.

    Args:
        reader: frame that reads ``os.environ``, perhaps through a function of the standard library.
    """
    while reader is not None and reader.f_globals.get("__name__") in _BETWEEN:
        reader = reader.f_back
    return reader is not None and reader.f_globals.get("__name__") in _READERS


def set_rank(environ: Mapping[str, str]) -> None:
    """Set the rank that imported modules keep, from the variables of a worker."""
    for module, variable in _RANKS.items():
        function = getattr(sys.modules.get(module), "rank_zero_only", None)
        if function is not None and hasattr(function, "rank") and variable in environ:
            function.rank = int(environ[variable])


BASICS = (Import("torch"), Import("torch.distributed"))
"""Imports that each worker needs, in addition to those of the script."""

_TRAIN = "azureml_elastic.train"

LATER = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.onnx",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.checkpoint",
    "torch.utils.serialization",
    "torch.utils.data.distributed",
    "numpy.random",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "multiprocessing.popen_fork",
)
"""Modules that torch 2.13 imports between ``import torch`` and the third step of a script with
``DistributedDataParallel``, optimizers, a ``DataLoader`` with workers and ``torch.save``. They were measured, and are
ordered so that none takes more than 0.5 s: ``torch._dynamo`` alone would take 1.2 s without the modules before it.
"""

LATER_OF_PACKAGES = {
    "accelerate": ("deepspeed", "datasets"),
    "deepspeed": (
        "setuptools",
        "deepspeed.module_inject.auto_ep_layer",
        "torch._dynamo.repro.after_dynamo",
        "torch._inductor.compile_fx",  # it decorates a function with torch.compile
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
    "lightning": ("adlfs",),
    "pytorch_lightning": ("adlfs",),
}
"""Modules that packages import, where they are installed, between a script's imports and its third step."""

_MOST_BYTES = 1 << 20


class Unsuitable(Exception):
    """A package must be imported by each worker, and workers must not be forked from this process any more."""

    def __init__(self, package: str, reason: str) -> None:
        super().__init__(reason)
        self.package = package


class Output:
    """Recorder of standard output and standard error, which are files of this process alone."""

    def __init__(self) -> None:
        self._flush_c = ctypes.CDLL(None).fflush

    def sizes(self) -> tuple[int, int]:
        """Return the sizes of both files in bytes."""
        self._flush()
        return os.fstat(1).st_size, os.fstat(2).st_size

    def truncate(self, sizes: tuple[int, int]) -> None:
        """Truncate both files to the given sizes."""
        self._flush()
        for descriptor, size in zip((1, 2), sizes, strict=True):
            os.ftruncate(descriptor, size)
            os.lseek(descriptor, size, os.SEEK_SET)

    def read(self) -> tuple[bytes, bytes]:
        """Return the first MiB of each file."""
        self._flush()
        return os.pread(1, _MOST_BYTES, 0), os.pread(2, _MOST_BYTES, 0)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._flush_c(None)


def prepare(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Set ``sys.argv`` and ``sys.path`` to the values of the program.

    As the interpreter does (``Modules/main.c``): the folder of the resolved script, or for ``-m`` the working
    directory, comes first on the path, unless ``-P`` or ``-I`` is given.
    """
    sys.argv[:] = [target if kind == "script" else "-m", *arguments]
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, str(Path.cwd()) if kind == "module" else os.path.dirname(os.path.realpath(target)))  # noqa: PTH120


def shadowed() -> str | None:
    """Return the path of a module beside the script that shadows one this process has imported, or ``None``.

    A script imports ``random.py`` beside it before the standard library's, part of which this process has imported
    before the script's folder was on the path.
    """
    if not sys.path:
        return None
    with contextlib.suppress(OSError):
        for entry in os.scandir(sys.path[0]):
            name, _, suffix = entry.name.partition(".")
            regular = suffix == "py" or (not suffix and Path(entry.path, "__init__.py").is_file())
            if regular and name in sys.modules and name not in {"__main__", "azureml_elastic"}:
                known = getattr(sys.modules[name], "__file__", None)
                if known is None or not Path(known).resolve().is_relative_to(Path(entry.path).resolve()):
                    return entry.path
    return None


def import_all(found: Sequence[Import], excluded: Sequence[str], output: Output) -> int:
    """Import the modules that the script imports, in its order; return the number of successful imports.

    An import that fails is left to the script.

    Args:
        excluded: top-level packages left to the workers.

    Raises:
        ImportError: torch cannot be imported.
        Unsuitable: an import has read a variable of a single worker, or started threads that a fork would not copy.
    """
    made = 0
    threads = len(native_threads())
    with watched(os.environ) as read:
        for wanted in found:
            if wanted.package in excluded:
                continue
            before = output.sizes()
            try:
                __import__(wanted.module, fromlist=list(wanted.names))
                if wanted == SESSION:
                    for module in pkgutil.iter_modules(sys.modules[_TRAIN].__path__, f"{_TRAIN}."):  # imported lazily
                        with contextlib.suppress(Exception):
                            importlib.import_module(module.name)
                made += 1
            except BaseException as error:
                output.truncate(before)
                if wanted in BASICS:
                    raise ImportError(f"{wanted.module} cannot be imported: {error!r}") from error
            if read:
                raise Unsuitable(wanted.package, f"{wanted.package} reads {read[0]} while it is imported")
            if len(native_threads()) > threads:
                # Only a fork tells which threads stop for it, as those of OpenBLAS do. It is tried after imports that
                # have added threads alone: it takes longer than most imports.
                if started := trial_fork():
                    raise Unsuitable(wanted.package, f"{wanted.package} {started} while it was imported")
                threads = len(native_threads())
    return made


def later_of_packages(excluded: Container[str]) -> list[str]:
    """Return the modules that imported packages are known to import later, and whose packages are installed."""
    wanted = dict.fromkeys(
        name for package in LATER_OF_PACKAGES if package in sys.modules for name in LATER_OF_PACKAGES[package]
    )
    packages = {name: name.partition(".")[0] for name in wanted if name not in sys.modules}
    return [
        name
        for name, package in packages.items()
        if package not in excluded and (package in sys.modules or find_spec(package) is not None)
    ]


def import_later(name: str, output: Output) -> None:
    """Import a module, if it can be imported; discard output and new warning filters."""
    before = output.sizes()
    filters = warnings.filters[:]
    with contextlib.suppress(Exception):
        importlib.import_module(name)
    warnings.filters[:] = filters  # type: ignore[index] # a list in fact
    output.truncate(before)


@contextlib.contextmanager
def watched(environ: os._Environ[str]) -> Iterator[list[str]]:
    """Record which variables of single workers are read in this context.

    Modules keep references to ``os.environ``, so the object stays the same and only its class is replaced.
    """
    usual = type(environ)
    read: list[str] = []

    class Watched(usual):  # type: ignore[valid-type,misc]
        def __getitem__(self, name: str) -> str:
            if is_per_worker(name) and not reads_rank_only(sys._getframe(1)):  # noqa: SLF001
                read.append(name)
            return str(super().__getitem__(name))

    environ.__class__ = Watched
    try:
        yield read
    finally:
        environ.__class__ = usual


def rehearse(package: str) -> int:
    """Start a process that imports a package and exits with 0 if it stays fit for forks; return its id."""
    server = os.getpid()
    process = os.fork()
    if process == 0:
        fit = False
        try:
            end_with(server)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the server's handler waits for workers
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
            with watched(os.environ) as read:
                importlib.import_module(package)
            fit = not read and trial_fork() is None
        finally:
            os._exit(0 if fit else 1)
    return process
