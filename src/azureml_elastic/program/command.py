"""The Python program that a job starts.

At submission, :func:`find_program` locates the program in the job's shell command, which may also prepare the node
(``pip install -r r.txt && python train.py | tee log``); the rest of the command is left to the shell unchanged. On the
node, :func:`parse_program` parses the words into which the shell has split the program.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from azureml_elastic.errors import CommandError
from azureml_elastic.program.launchers import NAMES, NEXT_STEP, command_name, instead_of, starts_cluster
from azureml_elastic.program.prefixes import is_assignment, is_interpreter, is_keyword, is_program, program_start
from azureml_elastic.program.shell import fill, runs_in_background, simple_commands

_SHELLS = frozenset({"bash", "dash", "sh", "zsh"})
_QUOTES = frozenset("'\"\\")
_FLAGS = frozenset("bBdEIOPqRsSuvx")
_FLAGS_WITH_VALUE = frozenset("WX")
_PRINTS = frozenset({"-V", "-VV", "--version", "-h", "--help", "-c"})
_WAITS = frozenset({"fg", "wait"})
_LOOPS = (["for"], ["until"], ["while"])


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
        commands = [] if _is_script(words[0]) else list(simple_commands(words[0]))
        if len(commands) > 1:
            raise CommandError(
                f"{words[0]!r} holds {len(commands)} shell commands where one Python program is expected. {NEXT_STEP}."
            )
        words = words if _is_script(words[0]) else [word.text for each in commands for word in each]
    if not words:
        raise CommandError(f"The command is empty. {NEXT_STEP}.")
    if is_interpreter(words[0]):
        return _parse_interpreted(words)
    if words[0].endswith(".py"):
        return Program(None, (), "script", words[0], tuple(words[1:]))
    raise CommandError(_no_program(words))


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
        if not start or not is_program(start[0]) or _prepares(start):
            others.append(start or words)
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
        telling = [words for words in others if command_name(words) in NAMES]
        telling += [words for words in others if _is_shell_text(words) or any(map(is_interpreter, words[1:]))]
        raise CommandError(_no_program([*telling, *others[-1:], []][0]))
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
    position, _ = program_start(words)
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
                if module in NAMES:
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
    """Return whether a call of Python only installs packages, runs a ``-c`` command, or prints what it is."""
    for word, following in itertools.pairwise([*words[1:], ""]):
        if not word.startswith("-"):
            return word.rsplit("/", 1)[-1] == "setup.py"
        if word in _PRINTS or word == "-m":
            return word != "-m" or following in ("pip", "venv", "ensurepip")
    return False


def _is_shell_text(words: Sequence[str]) -> bool:
    options = [word for word in words[1:3] if word.startswith("-") and not word.startswith("--")]
    return command_name(words) in _SHELLS and any("c" in word for word in options)


def _no_program(words: Sequence[str]) -> str:
    """Return why a command without a program is refused, and what to write instead."""
    if not words:
        return f"The command starts no Python program. {NEXT_STEP}."
    text = f"The command {shlex.join(words)!r} starts no Python program"
    if command_name(words) in NAMES:
        return f"{text} but the launcher {words[0]!r}; {instead_of(command_name(words), words[1:])}"
    if _is_shell_text(words):
        return (
            f"{text} but a shell of its own, whose program the agent cannot find. Give what follows -c as the command."
        )
    if any(is_interpreter(word) for word in words[1:]):
        return (
            f"{text} in whose place the agent could run: it is not known whether {words[0]!r} can start the agent. "
            f"Leave {words[0]!r} out. {NEXT_STEP}."
        )
    return f"{text}; the elastic agent has to start, watch and restart the workers itself. {NEXT_STEP}."
