"""Programs that start other programs, found in their text: launchers, whatever their names are.

A launcher is a program that is given another program, or starts a launcher or a cluster. The agent starts a program
once for each rank, so a launcher would start everything as many times.

A training script may be given files that end in ``.py``, too, such as its configuration, and may start other programs,
such as ``git``. Its text tells which it is: what trains is no launcher, a launcher starts processes of Python, and a
configuration is no program. Of a program whose text is not there, such as an installed module, only what it is given is
known: a program by its own text.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from azureml_elastic.config.command.launchers import (
    LAUNCHER_MODULES,
    LAUNCHERS,
    command_name,
    is_interpreter,
    starts_cluster,
)
from azureml_elastic.config.command.program import (
    Program,
    dotted_name,
    full_name,
    imported_names,
    parse_quietly,
    program_files,
)

__all__ = ["Launching", "find_launching"]

_STARTS = frozenset(
    {
        *(f"subprocess.{name}" for name in ("Popen", "call", "check_call", "check_output", "getoutput", "run")),
        *(f"os.{name}" for name in ("popen", "posix_spawn", "posix_spawnp", "system")),
        *(
            f"os.{kind}{form}"
            for kind in ("exec", "spawn")
            for form in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
        ),
        *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    }
)
"""Functions that start another program."""

_PROCESSES = frozenset(
    {
        *("multiprocessing.Pool", "multiprocessing.Process", "multiprocessing.get_context"),
        *("torch.multiprocessing.Process", "torch.multiprocessing.get_context"),
        *("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"),
    }
)
_RUNS_IN_PLACE = frozenset({"runpy.run_module", "runpy.run_path"})
"""Functions that run another program in this process; a launcher calls them in processes of its own."""

_TRAINING = frozenset(
    {
        *("Accelerator", "DataLoader", "DistributedDataParallel", "Fabric", "FullyShardedDataParallel", "backward"),
        *("fit", "fully_shard", "init_distributed", "init_process_group", "train"),
    }
)
"""Last parts of the names of functions that a training script calls, and a launcher does not; ``...Trainer`` too."""


@dataclass(frozen=True)
class Launching:
    """What makes a program a launcher.

    Args:
        where: place in its text, or in that of the program that it is given, such as ``launch.py:12``.
        what: predicate of the sentence about that place.
        given: the program that it is given; empty if it starts a launcher or a cluster of its own.
        argument: index of the argument that names the given program.
        is_module: whether the given program is the name of a module.
        starts: words of the launcher or cluster that it starts; empty if it is given a program.
    """

    where: str
    what: str
    given: str = ""
    argument: int = 0
    is_module: bool = False
    starts: tuple[str, ...] = ()


def find_launching(program: Program, folder: Path, *, runs_engine: bool = False) -> Launching | None:
    """Return what makes a program a launcher, ``None`` if nothing is known that does.

    Args:
        folder: working folder of the program, which has no installed programs here.
        runs_engine: whether the program is a driver, which may start programs on a cluster that it does not start.
    """
    texts = [(path, parse_quietly(text)) for path, text in program_files(program, folder)]
    modules = [_Module(path, tree) for path, tree in texts if tree is not None]
    if not texts:
        return None if runs_engine else _of_unknown(program, folder)
    if any(module.training() is not None for module in modules):
        return None
    starts_python: _Place | None = None
    for module in modules:
        for place in module.launches():
            if not runs_engine or starts_cluster(place.words):
                where = _shown(module.path, place.line, folder)
                return Launching(where, place.what, starts=place.words)
        found = None if runs_engine or starts_python else module.starts_python()
        if found is not None:
            starts_python = found._replace(where=_shown(module.path, found.line, folder))
    # Processes of Python alone make no launcher: a program that prepares data has them, too.
    if starts_python is not None:
        for given in _given(program.arguments, folder):
            if given.path is None or given.is_program():
                return Launching(starts_python.where, starts_python.what, given.name, given.argument, given.is_module)
    return None


class _Place(NamedTuple):
    line: int
    what: str
    words: tuple[str, ...] = ()
    where: str = ""


class _Module:
    """A module, and what of its text tells launchers and training scripts apart."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self._tree = tree
        self._imports: Mapping[str, str] = imported_names(tree)
        # Docstrings show commands that the module does not start.
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        self._nodes = [node for node in ast.walk(tree) if id(node) not in documentation or not _is_text(node)]

    def training(self) -> _Place | None:
        """Return where the module trains, or sets up what only a worker has."""
        for call in self._calls():
            last = dotted_name(call.func).rpartition(".")[2]
            if last in _TRAINING or last.endswith("Trainer"):
                return _Place(call.lineno, f"calls {last}()")
        return next((_Place(0, "") for name, _ in self._imported() if name.startswith("azureml_elastic")), None)

    def launches(self) -> Iterator[_Place]:
        """Yield where the module imports a launcher, or starts one or a cluster."""
        for name, line in self._imported():
            # The names of commands, such as accelerate and ray, are libraries that training scripts import.
            if name in LAUNCHER_MODULES - LAUNCHERS or name.startswith("torch.distributed.launcher"):
                yield _Place(line, f"imports {name}", (name,))
        for call in self._starts():
            for words in self._started(call):
                if _is_launcher(words):
                    yield _Place(call.lineno, f"starts {' '.join(words)!r}", words)

    def starts_python(self) -> _Place | None:
        """Return where the module starts processes of Python."""
        for call in self._starts():
            started = list(self._started(call))
            # What is made elsewhere, as by a function, is judged by the whole module.
            if any(map(_has_interpreter, started)) if started else self._names_interpreter():
                return _Place(call.lineno, f"calls {full_name(call.func, self._imports)}()")
        called = [(full_name(call.func, self._imports), call.lineno) for call in self._calls()]
        if any(name in _RUNS_IN_PLACE for name, _ in called):
            return next((_Place(line, f"calls {name}()") for name, line in called if name in _PROCESSES), None)
        return None

    def is_program(self) -> bool:
        """Return whether the module does something when it is run, as a configuration does not."""
        for statement in self._tree.body:
            if isinstance(statement, ast.For | ast.While):
                return True
            test = statement.test if isinstance(statement, ast.If) else None
            if isinstance(test, ast.Compare) and dotted_name(test.left) == "__name__":
                return True
            called = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and called.func.id != "print":
                return True
        return self.training() is not None

    def _calls(self) -> Iterator[ast.Call]:
        yield from (node for node in self._nodes if isinstance(node, ast.Call))

    def _starts(self) -> Iterator[ast.Call]:
        """Yield the calls that start another program, other than to install packages."""
        for call in self._calls():
            if full_name(call.func, self._imports) in _STARTS and not any(
                "pip" in each for each in self._started(call)
            ):
                yield call

    def _started(self, call: ast.Call) -> Iterator[tuple[str, ...]]:
        """Yield the words of the commands that a call starts, where they are written in it or assigned to a name."""
        values: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "args")]
        names = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
        for node in self._nodes:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            if isinstance(node, ast.Assign) and any(
                isinstance(each, ast.Name) and each.id in names for each in targets
            ):
                values.append(node.value)
        yield from (words for value in values if (words := _words(value)))

    def _names_interpreter(self) -> bool:
        return any(
            (isinstance(node, ast.Attribute | ast.Name) and full_name(node, self._imports) == "sys.executable")
            or _has_interpreter(_words(node))
            for node in self._nodes
        )

    def _imported(self) -> Iterator[tuple[str, int]]:
        for node in self._nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module, node.lineno
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


class _Given(NamedTuple):
    """A file that is an argument of a program."""

    name: str
    argument: int
    path: Path | None
    """``None`` if it is not there."""
    is_module: bool = False
    is_value: bool = False
    """Whether it may be the value of an option."""

    def module(self) -> _Module | None:
        """Return the module, ``None`` for a file of another kind."""
        tree = None
        if self.path is not None and self.path.suffix == ".py":
            try:
                tree = parse_quietly(self.path.read_bytes())
            except OSError:
                return None
        return None if tree is None or self.path is None else _Module(self.path, tree)

    def is_program(self) -> bool:
        """Return whether the file is a program rather than a configuration."""
        module = self.module()
        return module.is_program() if module is not None else self.name.endswith(".sh")


def _given(arguments: Sequence[str], folder: Path) -> Iterator[_Given]:
    """Yield the arguments that name a script or a local module."""
    for index, argument in enumerate(arguments):
        before = arguments[index - 1] if index else ""
        name = argument.rpartition("=")[2] if argument.startswith("-") else argument
        if name.endswith((".py", ".sh")):
            path = folder / name
            found = path if path.is_file() else None
            may_be_value = name != argument or (before.startswith("-") and "=" not in before)
            yield _Given(name, index, found, is_value=may_be_value)
        elif before in ("-m", "--module"):
            path = folder.joinpath(*argument.split("."))
            for each in (path.with_suffix(".py"), path / "__main__.py"):
                if each.is_file():
                    yield _Given(argument, index, each, is_module=True)


def _of_unknown(program: Program, folder: Path) -> Launching | None:
    """Return what makes a program a launcher whose text is not there."""
    for given in _given(program.arguments, folder):
        module = given.module()
        if module is None or not module.is_program():
            continue
        place = module.training()
        if place is None and given.is_value:
            continue  # a model, or the like, that can be run to try it
        what = place.what if place is not None and place.what else "is a program of its own"
        where = _shown(module.path, place.line if place is not None else 0, folder)
        return Launching(where, what, given.name, given.argument, given.is_module)
    return None


def _words(node: ast.AST) -> tuple[str, ...]:
    """Return the words of a text or list, as far as they are written there; none if the first one is not."""
    if isinstance(node, ast.List | ast.Tuple):
        if not node.elts or not _words(node.elts[0]):
            return ()
        return tuple(word for element in node.elts for word in _words(element))
    if isinstance(node, ast.JoinedStr):
        return tuple(word for part in node.values for word in _words(part))
    if isinstance(node, ast.Attribute) and dotted_name(node) == "sys.executable":
        return ("python",)
    return tuple(node.value.split()) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ()


def _has_interpreter(words: Sequence[str]) -> bool:
    return any(map(is_interpreter, words))


def _is_launcher(words: Sequence[str]) -> bool:
    """Return whether words start a launcher or a part of a cluster."""
    if not words:
        return False
    if is_interpreter(words[0]):
        return any(flag == "-m" and module in LAUNCHER_MODULES for flag, module in itertools.pairwise(words))
    if starts_cluster(words):
        return True
    ahead = any(word.startswith("-") or word.endswith(".py") or word == "launch" for word in words[1:])
    return ahead and command_name(words) in LAUNCHERS


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _shown(path: Path, line: int, folder: Path) -> str:
    name = path.relative_to(folder) if path.is_relative_to(folder) else path
    return f"{name}:{line}" if line else str(name)
