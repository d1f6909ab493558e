"""The Python program that a job starts, and its files.

At submission, :func:`find_program` locates the program in the job's shell command, which may also prepare the node
(``pip install -r r.txt && python train.py | tee log``); the rest of the command is left to the shell unchanged. On the
node, :func:`parse_program` parses the words into which the shell has split the program.

Its files are its own, and those of the local modules that it imports. Nothing is executed.
"""

from __future__ import annotations

import ast
import gc
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal, NamedTuple

from azureml_elastic.config.command.launchers import (
    LAUNCHER_MODULES,
    LAUNCHERS,
    NEXT_STEP,
    command_name,
    instead_of,
    is_assignment,
    is_interpreter,
    is_keyword,
    is_program,
    is_shell_text,
    no_program,
    program_start,
    starts_cluster,
)
from azureml_elastic.config.command.shell import fill, runs_in_background, simple_commands
from azureml_elastic.errors import CommandError

__all__ = [
    "FoundProgram",
    "Program",
    "dotted_name",
    "find_program",
    "full_name",
    "imported_names",
    "left_to_the_shell",
    "opens_session",
    "parse_program",
    "parse_quietly",
    "program_files",
    "require_script",
]

_QUOTES = frozenset("'\"\\")
_FLAGS = frozenset("bBdEIOPqRsSuvx")
_FLAGS_WITH_VALUE = frozenset("WX")
_PRINTS = frozenset({"-V", "-VV", "--version", "-h", "--help"})
_WAITS = frozenset({"fg", "wait"})
_LOOPS = (["for"], ["until"], ["while"])


def program_files(program: Program, folder: Path | None = None) -> Iterator[tuple[Path, bytes]]:
    """Yield the files that a program consists of, with their text, its own first; none if that cannot be found.

    Imports inside functions count as well. Local modules are those below the folder that Python puts first on the path:
    the script's folder, or the working directory for ``python -m``. Those of an installed program are the modules of
    its own package.

    Args:
        folder: working directory of the program, which has no installed programs here; ``None`` for that of this
            process, on whose path installed programs are.
    """
    if program.kind == "script":
        main = (folder or Path()) / program.target
        root = within = main.parent
    else:
        parts = program.target.split(".")
        root = within = folder or Path()
        main = root.joinpath(*parts).with_suffix(".py")
        below = root.joinpath(*parts, "__main__.py")
        if not main.is_file() and folder is not None:
            main = below
        elif not main.is_file() and (installed := _installed(parts)) is not None:
            main, root = installed
            within = root / parts[0]
    if not main.is_file():
        return
    seen: set[Path] = set()
    pending = [main]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_bytes()
        except OSError:
            continue
        yield path, text
        pending.extend(found for found in _local_imports(text, path, root) if found.is_relative_to(within))


def opens_session(program: Program) -> bool:
    """Return whether a program, or a local module that it imports, mentions this library; true without its file."""
    texts = [text for _, text in program_files(program)]
    return not texts or any(b"azureml_elastic" in text for text in texts)


def dotted_name(node: ast.AST) -> str:
    """Return the name that an expression consists of, such as ``os.environ``; what is no name in it is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a module imports, by the names that it has there."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def full_name(node: ast.AST, imports: Mapping[str, str]) -> str:
    """Return a dotted name with the module that its first part stands for."""
    first, dot, rest = dotted_name(node).partition(".")
    return f"{imports.get(first, first)}{dot}{rest}"


def parse_quietly(text: bytes) -> ast.Module | None:
    """Return the syntax tree of a module, ``None`` if it has none."""
    # The interpreter keeps one recursion depth for all threads while it builds a tree. A collection in between may run
    # finalizers, thus another thread that parses (a traceback that is logged does), and end in a SystemError
    # (CPython 3.11, https://github.com/python/cpython/issues/106905).
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are reported when the program runs
            return ast.parse(text)
    # Null bytes are a ValueError, and expressions that are nested too deeply one of the last two.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        if collecting:
            gc.enable()


def _installed(parts: list[str]) -> tuple[Path, Path] | None:
    """Return the file that ``python -m`` runs for a module on the path, and the folder that has its top package."""
    # Package by package, as importlib.util.find_spec() would import the packages around a module.
    folders: Iterable[str] | None = [str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    for end in range(1, len(parts) + 1):
        if folders is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:end]), list(folders))
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    if folders is not None:
        spec = PathFinder.find_spec(".".join([*parts, "__main__"]), list(folders))
    if spec is None or spec.origin is None:
        return None
    main = Path(spec.origin)  # of a package its __main__.py, one folder further down
    return main, main.parents[len(parts) - (folders is None)]


def _local_imports(text: bytes, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files of the local modules that a module imports."""
    tree = parse_quietly(text)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = root if node.level == 0 else path.parents[node.level - 1]
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files(base, [*parts, alias.name])
            if not parts:
                yield base / "__init__.py"


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the existing files of a dotted name below a folder: its packages' and the module's own."""
    for part in parts:
        base /= part
        candidates = (base.with_name(f"{part}.py"), base / "__init__.py")
        yield from (path for path in candidates if path.is_file())


@dataclass(frozen=True)
class Program:
    """A Python program with its interpreter and arguments."""

    interpreter: str | None
    """Interpreter as given, such as ``"/opt/bin/python"``; ``None`` for a bare script."""
    interpreter_options: tuple[str, ...]
    kind: Literal["script", "module"]
    target: str
    """Path of the script, or dotted name of the module."""
    arguments: tuple[str, ...]
    placeholders: str | None = None
    """Name in the placeholders of the arguments, which stand for variables of a worker; ``None`` if there are none."""

    @property
    def interpreter_command(self) -> tuple[str, ...]:
        """The interpreter with its options, unbuffered: this one, unless a path names another."""
        interpreter = self.interpreter if self.interpreter and os.sep in self.interpreter else sys.executable
        unbuffered = () if "-u" in self.interpreter_options else ("-u",)
        return interpreter, *unbuffered, *self.interpreter_options

    @property
    def command(self) -> tuple[str, ...]:
        """Command that starts the program on a node, with the placeholders."""
        module = ("-m",) if self.kind == "module" else ()
        return *self.interpreter_command, *module, self.target, *self.arguments

    def arguments_for(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the arguments of the worker that has this environment."""
        return fill(self.arguments, self.placeholders, environ)

    def command_for(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the command that starts the worker that has this environment."""
        return *self.command[: len(self.command) - len(self.arguments)], *self.arguments_for(environ)


class FoundProgram(NamedTuple):
    """The three consecutive parts of a shell command, which concatenate to the command."""

    before: str
    program: str
    after: str


def parse_program(argv: Sequence[str]) -> Program:
    """Parse the words that start a Python program.

    Args:
        argv: interpreter, its options, script or ``-m module``, and arguments; or a script that ends in ``.py`` and
            its arguments; or a single string with all of these.

    Raises:
        CommandError: the words start no Python program that the agent could run.
    """
    words = list(argv)
    if len(words) == 1 and any(character.isspace() or character in _QUOTES for character in words[0]):
        words = words if _is_script(words[0]) else _split(words[0])
    if not words:
        raise CommandError(f"The command is empty. {NEXT_STEP}.")
    if is_interpreter(words[0]):
        return _parse_interpreted(words)
    if words[0].endswith(".py"):
        return Program(None, (), "script", words[0], tuple(words[1:]))
    raise CommandError(no_program(words))


def _is_script(text: str) -> bool:
    """Return whether a text is the path of a script, with a space in its name or in that of its folder."""
    try:
        if Path(text).is_file():
            return True
    except (OSError, ValueError):  # longer than a path may be
        return False
    first = text.split()[:1]
    return text.endswith(".py") and not (is_interpreter(first[0]) or first[0].endswith(".py"))


def require_script(program: Program) -> None:
    """Check that the script exists. Modules are not checked, because only their own interpreter can find them.

    Raises:
        CommandError: the script does not exist.
    """
    if program.kind == "script" and not Path(program.target).is_file():
        raise CommandError(
            f"The script {program.target!r} does not exist in {Path.cwd()}. "
            "Give its path from there, or an absolute one."
        )


def find_program(shell_command: str) -> FoundProgram:
    """Locate the one Python program that a shell command starts.

    Commands before it may prepare the node, including ``python -m pip``, ``python setup.py``, ``python -c`` and
    ``python --version``; a pipe, redirection or clean-up may follow. Expressions of Azure ML (``${{...}}``) are treated
    as words.

    Raises:
        CommandError: the command starts no Python program, more than one, or one in a loop or in the background.
    """
    found: list[FoundProgram] = []
    others: list[list[str]] = []
    loops = 0
    for command in simple_commands(shell_command):
        words = [word.text for word in command]
        skipped, problem = program_start(words)
        start = words[skipped:]
        loops += (start[:1] in _LOOPS) - (start[:1] == ["done"])
        if not start or not is_program(start[0]):
            others.append(start or words)
            continue
        if _prepares(start):
            others.append(start)
            continue
        parse_program(start)
        if loops:
            raise CommandError(
                f"The command starts {shlex.join(start)!r} in a shell loop; an elastic job runs its program once. "
                "Move the loop into the training script, or submit one job per turn."
            )
        if problem:
            raise CommandError(f"In {shlex.join(words)!r}, {problem}.")
        cut = slice(command[skipped].start, command[-1].end)
        found.append(FoundProgram(shell_command[: cut.start], shell_command[cut], shell_command[cut.stop :]))
    if not found:
        launcher = next((words for words in others if command_name(words) in LAUNCHERS), None)
        behind = next((words for words in others if _may_hide_python(words)), None)
        raise CommandError(no_program(launcher or behind or (others[-1] if others else [])))
    if len(found) > 1:
        programs = ", ".join(repr(one.program) for one in found)
        raise CommandError(
            f"The command starts {len(found)} Python programs ({programs}); the elastic agent runs exactly one. Write "
            "'command' before the others, as in 'command python prepare.py && python train.py': the shell then runs "
            "them once per node, without the agent. Or call them from the training script."
        )
    if (cluster := next(filter(starts_cluster, others), None)) is not None:
        raise CommandError(
            f"The command {shlex.join(cluster)!r} would start a cluster of its own on each node; "
            f"{instead_of(command_name(cluster), [])} Leave {shlex.join(cluster)!r} out."
        )
    _refuse_lost_end(shell_command, found[0])
    return found[0]


def _refuse_lost_end(shell_command: str, found: FoundProgram) -> None:
    """Check that the command ends after its program, and that no line behind it is meant for the program."""
    end = len(found.before) + len(found.program)
    later = [command for command in simple_commands(shell_command) if command[0].start >= end]
    waiting = [command for command in later if command[0].text in _WAITS]
    if "$!" not in found.after and runs_in_background(shell_command, end):
        if not waiting:
            raise CommandError(
                f"The command starts {found.program!r} in the background (&) and ends without it; Azure ML ends the "
                "node with its command, and the program with the node. Leave '&' out, and 'nohup': a job needs no "
                "terminal."
            )
        if all(command[0].text == "wait" and len(command) == 1 for command in waiting):
            raise CommandError(
                f"The command starts {found.program!r} in the background (&), and 'wait' alone succeeds however that "
                "ends: a failed training would be called completed. Leave '&' and 'wait' out, or write 'wait $!'."
            )
    for command in later:
        names = [word.text.partition("=")[0].rstrip("+") for word in command if is_assignment(word.text)]
        if len(names) == len(command) and not any(name in shell_command[command[-1].end :] for name in names):
            raise CommandError(
                f"The command assigns {shell_command[command[0].start : command[-1].end]!r} after its program and "
                "never uses it. If it is an argument of the program, end the line before with a backslash and no "
                "space behind it; otherwise leave it out."
            )


def left_to_the_shell(words: Sequence[str]) -> int | None:
    """Return before which word of a simple command ``command`` leaves its Python program to the shell.

    ``None`` if the command starts no Python program that :func:`find_program` would return.
    """
    position = program_start(words).position
    if position == len(words) or not is_program(words[position]) or _prepares(list(words[position:])):
        return None
    return next(at for at, word in enumerate(words) if not (is_keyword(word) or is_assignment(word)))


def _parse_interpreted(words: list[str]) -> Program:
    interpreter, rest = words[0], words[1:]
    options: list[str] = []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--check-hash-based-pycs" and rest:
            options += [word, rest.pop(0)]
            continue
        for position, letter in enumerate(word[1:], start=1):  # flags may be joined, as in -um package.module
            value = word[position + 1 :]
            if letter == "m":
                if position > 1:
                    options.append(word[:position])
                module = value or (rest.pop(0) if rest else "")
                if not module:
                    raise CommandError(f"{shlex.join(words)!r} names no module after -m. {NEXT_STEP}.")
                if module in LAUNCHER_MODULES:
                    raise CommandError(
                        f"{shlex.join(words)!r} starts the launcher {module!r}; {instead_of(module, rest)}"
                    )
                return Program(interpreter, tuple(options), "module", module, tuple(rest))
            if letter in _FLAGS_WITH_VALUE:
                if not value and not rest:
                    raise CommandError(f"{shlex.join(words)!r} gives -{letter} no value. {NEXT_STEP}.")
                options += [word] if value else [word, rest.pop(0)]
                break
            if letter not in _FLAGS:
                raise CommandError(
                    f"{shlex.join(words)!r} gives the interpreter {word!r}, which starts no script or module that "
                    f"could run again after a restart. {NEXT_STEP}."
                )
        else:
            if len(word) == 1:
                raise CommandError(f"{shlex.join(words)!r} reads its program from standard input. {NEXT_STEP}.")
            options.append(word)
    if not rest:
        raise CommandError(f"{shlex.join(words)!r} starts the interpreter without a program. {NEXT_STEP}.")
    return Program(interpreter, tuple(options), "script", rest[0], tuple(rest[1:]))


def _prepares(words: list[str]) -> bool:
    """Return whether a call of Python only prepares the node.

    It installs packages, runs a ``-c`` command, or prints what the interpreter is.
    """
    for position, word in enumerate(words[1:], start=1):
        if not word.startswith("-"):
            return word.rsplit("/", 1)[-1] == "setup.py"
        if word == "-c" or word in _PRINTS:
            return True
        if word == "-m":
            return words[position + 1 : position + 2] in (["pip"], ["venv"], ["ensurepip"])
    return False


def _may_hide_python(words: Sequence[str]) -> bool:
    return is_shell_text(words) or any(is_interpreter(word) for word in words[1:])


def _split(text: str) -> list[str]:
    commands = list(simple_commands(text))
    if len(commands) > 1:
        raise CommandError(
            f"{text!r} holds {len(commands)} shell commands where one Python program is expected. {NEXT_STEP}."
        )
    return [word.text for word in commands[0]] if commands else []
