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


class Launching(NamedTuple):
    """What makes a program a launcher."""

    where: str
    """Place in its text, or in that of the program that it is given, such as ``launch.py:12``."""
    what: str
    """Predicate of the sentence about that place."""
    given: Given | None = None
    """The program that it is given; ``None`` if it starts a launcher or a cluster of its own."""
    starts: tuple[str, ...] = ()
    """Words of the launcher or cluster that it starts."""


class Given(NamedTuple):
    """A file that is an argument of a program."""

    name: str
    argument: int
    path: Path
    is_module: bool
    """Whether the argument is the name of a module."""
    is_value: bool = False
    """Whether it may be the value of an option."""

    def module(self) -> Module | None:
        """Return the module, ``None`` for a file of another kind."""
        try:
            return Module(self.path, self.path.read_bytes(), self.name) if self.path.suffix == ".py" else None
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
    if launching.given is None:
        raise CommandError(
            f"{launching.where} {launching.what}, so that {program.target!r} is a launcher of its own on each node; "
            f"{instead_of(command_name(launching.starts), launching.starts[1:])}"
        )
    raise CommandError(
        f"{program.target!r} is given the program {launching.given.name!r}, as a launcher is ({launching.where} "
        f"{launching.what}); the elastic agent takes the launcher's place and starts the workers itself. Give "
        f"command={_without(found, program, launching.given)!r}, and process_count_per_instance, the number of workers "
        "of a node, to ElasticDistribution. A program that only prepares each worker can call runpy.run_path()."
    )


def find_launching(
    program: Program, folder: Path, modules: Sequence[Module], *, runs_engine: bool = False
) -> Launching | None:
    """Return what makes a program a launcher, ``None`` if nothing is known that does.

    Args:
        folder: working folder of the program, which has no installed programs here.
        runs_engine: whether the program is a driver, which may start programs on a cluster that it does not start.
    """
    if any(_training(module) for module in modules):
        return None
    for found in (found for module in modules for found in _launches(module)):
        if not runs_engine or starts_cluster(found.starts):
            return found
    if runs_engine:
        return None
    # Processes of Python alone make no launcher: a program that prepares data has them, too.
    starting = next(filter(None, map(_starts_python, modules)), None)
    for given in _given(program.arguments, folder) if starting or not modules else ():
        module = given.module()
        if starting:
            if not given.path.is_file() or given.name.endswith(".sh") or (module and _is_program(module)):
                return starting._replace(given=given)
        elif module and _is_program(module):
            training = _training(module)
            if training or not given.is_value:  # a value is a model, or the like, that can be run to try it
                where, what = training if training and training[1] else (module.shown, "is a program of its own")
                return Launching(where, what, given)
    return None


def _training(module: Module) -> tuple[str, str] | None:
    """Return where a module trains, or sets up what only a worker has, and the predicate of the sentence about it."""
    for call in module.calls:
        last = dotted_name(call.func).rpartition(".")[2]
        if last in _TRAINING or last.endswith("Trainer"):
            return module.place(call.lineno), f"calls {last}()"
    uses = any(each.dotted.startswith("azureml_elastic") for each in module.imports if not each.level)
    return (module.shown, "") if uses else None


def _launches(module: Module) -> Iterator[Launching]:
    """Yield where a module imports a launcher, or starts one or a cluster."""
    for each in module.imports:
        # The names of commands, such as accelerate, and all of engines are libraries that training scripts import.
        for name in (each.dotted.rpartition(".")[0], each.dotted) if not each.level else ():
            known = "." in name and name in NAMES and not NAMES[name].framework
            if known or name.startswith("torch.distributed.launcher"):
                yield Launching(module.place(each.line), f"imports {name}", starts=(name,))
    for call in _starts(module):
        for words in filter(_is_launcher, _started(module, call)):
            yield Launching(module.place(call.lineno), f"starts {' '.join(words)!r}", starts=words)


def _starts_python(module: Module) -> Launching | None:
    """Return where a module starts processes of Python."""
    for call in _starts(module):
        started = list(_started(module, call))
        # What is made elsewhere, as by a function, is judged by the whole module.
        if any(map(_has_interpreter, started)) if started else _names_interpreter(module):
            return Launching(module.place(call.lineno), f"calls {module.full_name(call.func)}()")
    called = [(module.full_name(call.func), call.lineno) for call in module.calls]
    if any(name in _RUNS_IN_PLACE for name, _ in called):
        processes = (Launching(module.place(line), f"calls {name}()") for name, line in called if name in _PROCESSES)
        return next(processes, None)
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
    yield from filter(None, map(_words, values))


def _names_interpreter(module: Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute | ast.Name) and module.full_name(node) == "sys.executable")
        or _has_interpreter(_words(node))
        for node in module.nodes
    )


def _given(arguments: Sequence[str], folder: Path) -> Iterator[Given]:
    """Yield the arguments that name a script or a local module."""
    for index, argument in enumerate(arguments):
        before = arguments[index - 1] if index else ""
        name = argument.rpartition("=")[2] if argument.startswith("-") else argument
        if name.endswith((".py", ".sh")):
            may_be_value = name != argument or (before.startswith("-") and "=" not in before)
            yield Given(name, index, folder / name, is_module=False, is_value=may_be_value)
        elif before in ("-m", "--module"):
            path = folder.joinpath(*argument.split("."))
            paths = filter(Path.is_file, (path.with_suffix(".py"), path / "__main__.py"))
            yield from (Given(argument, index, each, is_module=True) for each in paths)


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
    ahead = any(word.startswith("-") or word.endswith(".py") or word == "launch" for word in words[1:])
    return starts_cluster(words) or (ahead and command_name(words) in NAMES)


def _without(found: FoundProgram, program: Program, given: Given) -> str:
    """Return a command that starts the program that a launcher is given."""
    words = next(simple_commands(found.program))
    first = len(words) - len(program.arguments)
    word = words[first + given.argument]
    launcher = 2 if program.kind == "module" else 1  # words that name it
    interpreter = found.program[: words[first - launcher].start] or "python "
    # The value of an option may be in the option's word.
    start = word.start if word.text == given.name else word.end - len(given.name)
    return f"{found.before}{interpreter}{'-m ' if given.is_module else ''}{found.program[start:]}{found.after}"
