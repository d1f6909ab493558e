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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import FoundProgram, Program, parse_program
from azureml_elastic.program.launchers import NAMES, command_name, instead_of, starts_cluster
from azureml_elastic.program.prefixes import is_interpreter
from azureml_elastic.program.shell import simple_commands
from azureml_elastic.program.source import Module, dotted_name, text_of

_FORMS = ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
_STARTS = frozenset(
    {
        *(f"subprocess.{name}" for name in ("Popen", "call", "check_call", "check_output", "getoutput", "run")),
        *(f"os.{name}" for name in ("popen", "posix_spawn", "posix_spawnp", "system")),
        *(f"os.{kind}{form}" for kind in ("exec", "spawn") for form in _FORMS),
        *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    }
)
"""Functions that start another program."""

_PROCESSES = frozenset(
    {
        *(f"{package}multiprocessing.{name}" for package in ("", "torch.") for name in ("Process", "get_context")),
        *("multiprocessing.Pool", "torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"),
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


class _Place(NamedTuple):
    line: int
    what: str
    words: tuple[str, ...] = ()


class _Given(NamedTuple):
    """A file that is an argument of a program."""

    name: str
    argument: int
    path: Path
    is_module: bool = False
    is_value: bool = False
    """Whether it may be the value of an option."""

    def module(self) -> Module | None:
        """Return the module, ``None`` for a file of another kind."""
        if self.path.suffix != ".py":
            return None
        try:
            return Module(self.path, self.path.read_bytes())
        except OSError:
            return None


def refuse_launching(found: FoundProgram, folder: Path, modules: Sequence[Module], *, runs_engine: bool) -> None:
    """Check that a program is not given another program, as a launcher is, and starts no launcher or cluster itself.

    Raises:
        CommandError: it does; the message has what to write.
    """
    program = parse_program([found.program])
    launching = find_launching(program, folder, modules, runs_engine=runs_engine)
    if launching is None:
        return
    if launching.starts:
        raise CommandError(
            f"{launching.where} {launching.what}, so that {program.target!r} is a launcher of its own on each node; "
            f"{instead_of(command_name(launching.starts), launching.starts[1:])}"
        )
    raise CommandError(
        f"{program.target!r} is given the program {launching.given!r}, as a launcher is ({launching.where} "
        f"{launching.what}); the elastic agent takes the launcher's place and starts the workers itself. Give "
        f"command={_without(found, program, launching)!r}, and process_count_per_instance, the number of workers of a "
        "node, to ElasticDistribution. A program that only prepares each worker can call runpy.run_path()."
    )


def find_launching(
    program: Program, folder: Path, modules: Sequence[Module], *, runs_engine: bool = False
) -> Launching | None:
    """Return what makes a program a launcher, ``None`` if nothing is known that does.

    Args:
        folder: working folder of the program, which has no installed programs here.
        modules: modules of the program.
        runs_engine: whether the program is a driver, which may start programs on a cluster that it does not start.
    """
    if not modules:
        return None if runs_engine else _of_unknown(program, folder)
    if any(_training(module) is not None for module in modules):
        return None
    starting: tuple[Module, _Place] | None = None
    for module in modules:
        for place in _launches(module):
            if not runs_engine or starts_cluster(place.words):
                return Launching(module.place(folder, place.line), place.what, starts=place.words)
        if starting is None and not runs_engine and (found := _starts_python(module)) is not None:
            starting = module, found
    # Processes of Python alone make no launcher: a program that prepares data has them, too.
    if starting is not None:
        module, place = starting
        for given in _given(program.arguments, folder):
            read = given.module()
            if not given.path.is_file() or given.name.endswith(".sh") or (read is not None and _is_program(read)):
                where = module.place(folder, place.line)
                return Launching(where, place.what, given.name, given.argument, given.is_module)
    return None


def _of_unknown(program: Program, folder: Path) -> Launching | None:
    """Return what makes a program a launcher whose text is not there."""
    for given in _given(program.arguments, folder):
        module = given.module()
        if module is None or not _is_program(module):
            continue
        place = _training(module)
        if place is None and given.is_value:
            continue  # a model, or the like, that can be run to try it
        line, what = (place.line, place.what) if place is not None and place.what else (0, "is a program of its own")
        return Launching(module.place(folder, line), what, given.name, given.argument, given.is_module)
    return None


def _training(module: Module) -> _Place | None:
    """Return where a module trains, or sets up what only a worker has."""
    for call in module.calls:
        last = dotted_name(call.func).rpartition(".")[2]
        if last in _TRAINING or last.endswith("Trainer"):
            return _Place(call.lineno, f"calls {last}()")
    uses = any(each.dotted.startswith("azureml_elastic") for each in module.imports if not each.level)
    return _Place(0, "") if uses else None


def _launches(module: Module) -> Iterator[_Place]:
    """Yield where a module imports a launcher, or starts one or a cluster."""
    for each in module.imports:
        # The names of commands, such as accelerate, and all of engines are libraries that training scripts import.
        for name in (each.dotted.rpartition(".")[0], each.dotted) if not each.level else ():
            known = "." in name and name in NAMES and not NAMES[name].framework
            if known or name.startswith("torch.distributed.launcher"):
                yield _Place(each.line, f"imports {name}", (name,))
    for call in _starts(module):
        for words in _started(module, call):
            if _is_launcher(words):
                yield _Place(call.lineno, f"starts {' '.join(words)!r}", words)


def _starts_python(module: Module) -> _Place | None:
    """Return where a module starts processes of Python."""
    for call in _starts(module):
        started = list(_started(module, call))
        # What is made elsewhere, as by a function, is judged by the whole module.
        if any(map(_has_interpreter, started)) if started else _names_interpreter(module):
            return _Place(call.lineno, f"calls {module.full_name(call.func)}()")
    called = [(module.full_name(call.func), call.lineno) for call in module.calls]
    if any(name in _RUNS_IN_PLACE for name, _ in called):
        return next((_Place(line, f"calls {name}()") for name, line in called if name in _PROCESSES), None)
    return None


def _is_program(module: Module) -> bool:
    """Return whether a module does something when it is run, as a configuration does not."""
    for statement in module.tree.body:
        match statement:
            case ast.For() | ast.While() | ast.If(test=ast.Compare(left=ast.Name("__name__"))):
                return True
            case ast.Expr(ast.Call(func=ast.Name(name))) if name != "print":
                return True
    return _training(module) is not None


def _starts(module: Module) -> Iterator[ast.Call]:
    """Yield the calls that start another program, other than to install packages."""
    for call in module.calls:
        if module.full_name(call.func) in _STARTS and not any("pip" in words for words in _started(module, call)):
            yield call


def _started(module: Module, call: ast.Call) -> Iterator[tuple[str, ...]]:
    """Yield the words of the commands that a call starts, where they are written in it or assigned to a name."""
    values: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "args")]
    names = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
    assigned = (node for node in module.nodes if isinstance(node, ast.Assign))
    values += [node.value for node in assigned if names.intersection(map(dotted_name, node.targets))]
    yield from (words for value in values if (words := _words(value)))


def _names_interpreter(module: Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute | ast.Name) and module.full_name(node) == "sys.executable")
        or _has_interpreter(_words(node))
        for node in module.nodes
    )


def _given(arguments: Sequence[str], folder: Path) -> Iterator[_Given]:
    """Yield the arguments that name a script or a local module."""
    for index, argument in enumerate(arguments):
        before = arguments[index - 1] if index else ""
        name = argument.rpartition("=")[2] if argument.startswith("-") else argument
        if name.endswith((".py", ".sh")):
            may_be_value = name != argument or (before.startswith("-") and "=" not in before)
            yield _Given(name, index, folder / name, is_value=may_be_value)
        elif before in ("-m", "--module"):
            path = folder.joinpath(*argument.split("."))
            for each in (path.with_suffix(".py"), path / "__main__.py"):
                if each.is_file():
                    yield _Given(argument, index, each, is_module=True)


def _words(node: ast.AST) -> tuple[str, ...]:
    """Return the words of a text or list, as far as they are written there; none if the first one is not."""
    match node:
        case ast.List(elts) | ast.Tuple(elts):
            return tuple(word for each in elts for word in _words(each)) if elts and _words(elts[0]) else ()
        case ast.JoinedStr(values):
            return tuple(word for part in values for word in _words(part))
        case ast.Attribute() if dotted_name(node) == "sys.executable":
            return ("python",)
    return tuple(text_of(node).split())


def _has_interpreter(words: Sequence[str]) -> bool:
    return any(map(is_interpreter, words))


def _is_launcher(words: Sequence[str]) -> bool:
    """Return whether words start a launcher or a part of a cluster."""
    if is_interpreter(words[0]):
        return any(flag == "-m" and module in NAMES for flag, module in itertools.pairwise(words))
    if starts_cluster(words):
        return True
    ahead = any(word.startswith("-") or word.endswith(".py") or word == "launch" for word in words[1:])
    return ahead and command_name(words) in NAMES


def _without(found: FoundProgram, program: Program, launching: Launching) -> str:
    """Return a command that starts the program that a launcher is given."""
    words = next(simple_commands(found.program))
    first = len(words) - len(program.arguments)
    given = words[first + launching.argument]
    launcher = 2 if program.kind == "module" else 1  # words that name it
    interpreter = found.program[: words[first - launcher].start] or "python "
    # The value of an option may be in the option's word.
    start = given.start if given.text == launching.given else given.end - len(launching.given)
    module = "-m " if launching.is_module else ""
    return f"{found.before}{interpreter}{module}{found.program[start:]}{found.after}"
