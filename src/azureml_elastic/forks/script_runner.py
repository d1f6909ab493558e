"""Conversion of a forked child into the process that ``python script.py`` or ``python -m module`` would create.

It reproduces the interpreter's start, which is in ``Modules/main.c`` and ``Python/pylifecycle.c``. Where that is not
possible exactly (a script that is a folder, has a syntax error, or is missing), the child executes the command of a
plain start.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import importlib.machinery
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, TracebackType
from typing import Any, NoReturn

from azureml_elastic.forks import uncaught_error
from azureml_elastic.forks.stack_imports import for_plain_start

_NAMES_OF_MAIN = frozenset(
    {"__annotations__", "__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"}
)
_STANDARD_ERROR = 2


def adopt_descriptors(*streams: int) -> None:
    """Make these descriptors standard output and standard error, or before them standard input."""
    for target, source in enumerate(streams, start=_STANDARD_ERROR + 1 - len(streams)):
        os.dup2(source, target)
        os.close(source)
    _reopen(sys.__stdin__, 0, "rb")
    _reopen(sys.__stdout__, 1, "wb")
    _reopen(sys.__stderr__, 2, "wb")


def adopt_environment(wanted: Mapping[str, str]) -> None:
    """Replace the environment."""
    os.environ.clear()
    os.environ.update(wanted)


def adopt_imports(printed: Iterable[bytes], variables: Mapping[str, str | None]) -> None:
    """Repeat the effects that the imports had in the preload server.

    Args:
        printed: output on standard output and standard error.
        variables: environment variables that were set, ``None`` for removed ones.
    """
    for descriptor, text in enumerate(printed, start=1):
        while text:
            text = text[os.write(descriptor, text) :]  # noqa: PLW2901 - the rest of it
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def reset_process_state() -> None:
    """Renew the state of its own that a new process has: random seeds, keys, caches."""
    # Python reseeds the module random itself.
    sys.modules["torch"].default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    main_thread = threading.main_thread()
    if main_thread.native_id != threading.get_native_id():
        main_thread._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001 - Python 3.11 forgets it
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()
    gc.enable()


def become(kind: str, target: str, command: Sequence[str]) -> Callable[[], Any]:
    """Set up ``__main__`` and :data:`sys.orig_argv` for the program and return the function that runs it.

    Args:
        command: command of a plain start, executed if the program cannot be run from here.
    """
    sys.orig_argv[:] = command
    namespace = sys.modules["__main__"].__dict__
    if kind == "module":
        import runpy

        _clear(namespace)
        run = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001 - what ``-m`` calls
        _disguise(run.__code__.co_filename)
        return functools.partial(run, target)
    path = target if os.path.isabs(target) else f"{os.getcwd()}/{target}"  # noqa: PTH109, PTH117 - not normalised
    code = _compile(path)
    # Before __main__ is changed: the new interpreter reports the error as it reports any.
    if code is None:
        execute(command)
    _clear(namespace)
    namespace["__file__"] = path
    if sys.version_info < (3, 15):
        namespace["__cached__"] = None
    namespace["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    _disguise(path)
    return functools.partial(exec, code, namespace)


def execute(command: Sequence[str]) -> NoReturn:
    """Replace this process by a plainly started one."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a new interpreter would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), for_plain_start(os.environ))  # noqa: S606
    except OSError as error:
        os.write(2, f"{command[0]} cannot be executed: {error.strerror}\n".encode(errors="replace"))
        os._exit(127)


def on_uncaught() -> None:
    """Remove the outermost frame, which is not the user's, from the traceback of an uncaught exception, and record it.

    ``sys.excepthook``, which the interpreter calls, is replaced for this one call.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        sys.excepthook = hook
        inner = traceback.tb_next if traceback is not None else None
        error.__traceback__ = sys.last_traceback = inner
        uncaught_error.record(error, os.environ)
        try:
            hook(kind, error, inner)
        except BaseException as failed:
            if failed.__traceback__ is not None:
                failed.__traceback__ = failed.__traceback__.tb_next  # this frame; Python 3.10 shows it nevertheless
            raise
        finally:
            on_end()

    sys.excepthook = show


def on_end() -> None:
    """Remove the names from ``__main__`` that the interpreter removes after a script's last line."""
    main = sys.modules.get("__main__")
    if main is not None and main.__spec__ is None:
        for name in ("__file__", "__cached__"):
            main.__dict__.pop(name, None)


def _clear(namespace: dict[str, Any]) -> None:
    for name in set(namespace) - _NAMES_OF_MAIN:
        del namespace[name]


def _compile(path: str) -> CodeType | None:
    """Compile a script; return ``None`` if only the interpreter can run it or report its error."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            source = file.read()
        if path.endswith(".pyc") or _has_option_x(sys.orig_argv):
            return None
        return compile(source, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError, Warning):
        return None


def _has_option_x(command: Sequence[str]) -> bool:
    """Return whether the option ``-x``, which skips the first line of the script, may be given."""
    for word in command[1:]:
        if not word.startswith("-") or word == "-":
            return False
        if "x" in word and not word.startswith(("-X", "-W", "--")):
            return True
    return False


def _disguise(path: str) -> None:
    """Set the file name of the outermost frame to that of the script.

    Programs search the script at the end of ``inspect.stack()``.
    """
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        import _imp

        # importlib uses this function for compiled files that were moved.
        _imp._fix_co_filename(frame.f_code, path)  # type: ignore[attr-defined]  # noqa: SLF001


class _Output(io.FileIO):
    """Standard output or error in a file: what a full disk does not take is dropped, as no print may end training."""

    _dropped = 0

    def write(self, data: Any) -> int:
        try:
            if self._dropped and super().write(b"\n[%d bytes of output were dropped]\n" % self._dropped):
                self._dropped = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            size = memoryview(data).nbytes
            self._dropped += size
            return size


def _reopen(stream: Any, descriptor: int, mode: str) -> None:
    """Reinitialize a standard stream on its current descriptor.

    A stream caches whether it is a terminal and can seek, and modules keep references to it, so the object stays. The
    arguments are those of ``create_stdio`` in ``pylifecycle.c``.
    """
    if stream is None:
        return
    writes = mode == "wb"
    unbuffered = stream.write_through  # option -u, which sys.flags does not have
    bare = writes and unbuffered
    raw: Any = _Output(descriptor, mode, closefd=False) if writes else io.FileIO(descriptor, mode, closefd=False)
    buffer = raw if bare else (io.BufferedWriter if writes else io.BufferedReader)(raw)
    raw.name = stream.name
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=not unbuffered and (raw.isatty() or descriptor == _STANDARD_ERROR),
        write_through=unbuffered,
    )
    stream.mode = "w" if writes else "r"
