"""Conversion of a forked child into the process that ``python script.py`` or ``python -m module`` would create.

It reproduces the interpreter's start, which is in ``Modules/main.c`` and ``Python/pylifecycle.c``. Where that is not
possible exactly (a script that is a folder, has a syntax error, or is missing), the child executes the command of a
plain start.

**Names the file that could not be read in the message of an uncaught exception.** Readers of checkpoints say what is
wrong with a file (``Ran out of input``) but not which file it is. The file is found in the frames of the traceback,
whose local variables still hold it. Only the names of regular files are added.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.machinery
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from azureml_elastic.node.preload.stack_imports import for_plain_start

__all__ = [
    "add_file_name",
    "adopt_descriptors",
    "adopt_environment",
    "adopt_imports",
    "become",
    "execute",
    "find_file",
    "install",
    "on_end",
    "on_uncaught",
    "read_json",
    "reset_process_state",
]

_READERS = {
    ("json", "load"): "fp",
    ("numpy", "load"): "file",
    ("safetensors", "load_file"): "filename",
    ("torch", "load"): "f",
}
"""Variable with the file in functions that read one, by package and name of the function."""
_PACKAGES = frozenset({"_pickle", "codecs", "json", "numpy", "pathlib", "pickle", "safetensors", "zipfile"})
"""Packages whose frames are passed over to find the caller of a reader that has no frame or no name of the file."""
_UNREADABLE = frozenset(
    {"BadZipFile", "EOFError", "JSONDecodeError", "SafetensorError", "UnicodeDecodeError", "UnpicklingError"}
)
"""Exceptions of readers of which the caller knows the file."""
_MOST_BYTES_PER_CHARACTER = 4
_WORD = re.compile(r"[^\W\d]\w*")


def install() -> None:
    """Name the file in the message of each exception that :data:`sys.excepthook` shows."""
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        add_file_name(error)
        shown_by(kind, error, traceback)

    sys.excepthook = show


def add_file_name(error: BaseException) -> None:
    """Put the name of the unreadable file before the message of the exception of the chain that says so."""
    with contextlib.suppress(Exception):  # an error without the name is better than none
        for each in _chain(error):
            path = find_file(each)
            if path is not None:
                _extend(each, path)
                return


def find_file(error: BaseException) -> Path | None:
    """Return the path of the regular file at whose reading an exception was raised, ``None`` if it was none."""
    if not isinstance(error, Exception):
        return None
    frames = list(_frames(error.__traceback__))
    for frame, _ in reversed(frames):
        variable = _READERS.get((_package(frame), frame.f_code.co_name))
        path = _path_of(frame.f_locals.get(variable)) if variable else None
        if path is not None:
            return path
    if type(error).__name__ not in _UNREADABLE:
        return None
    caller = next(((frame, line) for frame, line in reversed(frames) if _package(frame) not in _PACKAGES), None)
    return _only_file(*caller, read=_text_of(error)) if caller else None


def _only_file(frame: FrameType, line: int, read: str | bytes | None) -> Path | None:
    """Return the one file among the variables of a line, or, where its content is known, among those of a function."""
    names = set(_WORD.findall(linecache.getline(frame.f_code.co_filename, line, frame.f_globals)))
    if read is not None and frame.f_locals is not frame.f_globals:
        names |= set(frame.f_locals)
    paths = {path for name in names if (path := _path_of(frame.f_locals.get(name, frame.f_globals.get(name))))}
    if read is not None:
        paths = {path for path in paths if _contains(path, read)}
    return paths.pop() if len(paths) == 1 else None


def _text_of(error: Exception) -> str | bytes | None:
    """Return the text that an exception carries, of which a file with another content is not the source."""
    text = getattr(error, "doc", error.object if isinstance(error, UnicodeDecodeError) else None)
    return text if isinstance(text, (str, bytes)) else None


def _contains(path: Path, text: str | bytes) -> bool:
    if isinstance(text, bytes):
        return text in path.read_bytes()
    if path.stat().st_size > _MOST_BYTES_PER_CHARACTER * (len(text) + 1):
        return False
    return path.read_text(encoding="utf-8", errors="replace") == text


def _path_of(value: Any) -> Path | None:
    """Return the absolute path of a regular file that a variable is, names, or has open."""
    name = value if isinstance(value, (str, os.PathLike)) else getattr(value, "name", None)
    if isinstance(value, type) or not isinstance(name, (str, os.PathLike)):
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        path = Path(os.fsdecode(name)).absolute()
        return path if path.is_file() else None
    return None


def _extend(error: BaseException, path: Path) -> None:
    """Put the file before the first line of the message, which is what tables and signatures show."""
    found = path.stat()
    modified = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.st_mtime))
    where = f"while reading {path} ({found.st_size} bytes, modified {modified} UTC; remove it if it is incomplete)"
    if where in str(error):
        return
    if isinstance(error, UnicodeDecodeError):
        error.reason = f"{error.reason}, {where}"
        return
    before = error.args
    text = before[0] if before and isinstance(before[0], str) else str(error)
    error.args = (f"{where}: {text}" if text else where, *before[1:])
    if where not in str(error):  # the message is not made from the arguments
        error.args = before
        if sys.version_info >= (3, 11):
            error.add_note(where)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an exception and those it was raised from, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_NAMES_OF_MAIN = frozenset(
    {"__annotations__", "__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"}
)
_STANDARD_ERROR = 2


def adopt_descriptors(stdout: int, stderr: int) -> None:
    """Make these descriptors standard output and standard error."""
    for source, target in ((stdout, 1), (stderr, 2)):
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
        kind: ``"script"`` or ``"module"``.
        target: path of the script or name of the module.
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
    """Remove the outermost frame, which is not the user's, from the traceback of an uncaught exception.

    The message gets the name of the file that could not be read.
    ``sys.excepthook``, which the interpreter calls, is replaced for this one call.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        sys.excepthook = hook
        inner = traceback.tb_next if traceback is not None else None
        error.__traceback__ = sys.last_traceback = inner
        add_file_name(error)
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
    buffer: Any = open(descriptor, mode, buffering=0 if bare else -1, closefd=False)  # noqa: SIM115
    raw = buffer if bare else buffer.raw
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


def read_json(descriptor: int) -> Any:
    """Read a JSON document from the start of a file."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return json.loads(file.read())
