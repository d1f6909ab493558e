"""Translation of launcher commands, such as ``torchrun --nproc_per_node 4 train.py``.

The agent replaces the launcher, so the program becomes the command, and options such as the number of workers become
fields of the distribution. Options that only the launcher could handle are rejected by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import left_to_the_shell
from azureml_elastic.program.launchers import CALLS, LAUNCHERS, TORCHRUN, Launcher
from azureml_elastic.program.prefixes import is_interpreter, is_program, program_start
from azureml_elastic.program.shell import Word, replaced, simple_commands

_COUNT = "process_count_per_instance"
_ALL_GPUS = {"gpu", "auto", "-1"}
_SCRIPT_OPTIONS = frozenset({"nproc-per-node", "nnodes"})
"""Options of which one makes a script a launcher, if another script follows."""

_LOCATED = re.compile(r"\$\((?:which|command\s+-v|type\s+-[pP])\s+([\w-]+)\s*\)|`which\s+([\w-]+)\s*`|(?:.*/)?([\w-]+)")
"""A launcher's name, its path, or a command that prints its path."""


class _Call(NamedTuple):
    """Call of a launcher in the words of a command."""

    launcher: Launcher
    start: int  # index of its first word: the interpreter, or the launcher itself
    interpreter: int  # index after the interpreter's words; ``start`` if there are none
    end: int


def _call(words: Sequence[str]) -> _Call | None:
    """Return the call of a launcher in the words of a simple command, or ``None``."""
    start = position = program_start(words)[0]
    if words[start : start + 1] and is_interpreter(words[start]):
        position += 1
        while position < len(words) and words[position].startswith("-") and words[position] != "-m":
            position += 1
    if position == len(words):
        return None
    match = _LOCATED.fullmatch(words[position])
    name = next((name for name in match.groups() if name), "") if match else words[position]
    rest = (name, *words[position + 1 :])
    for call, launcher in CALLS.items():
        if rest[: len(call)] == call and (call[0] != "-m" or position > start):
            return _Call(launcher, start, position, position + len(call))
    module = words[position] == "-m" and position > start and len(rest) > 1
    if not module and not words[position].endswith(".py"):
        return None
    end = position + 1 + module
    return _Call(replace(TORCHRUN, name=words[end - 1]), start, position, end)


@dataclass(frozen=True)
class Launched:
    """The equivalent of a command with a launcher: the command without it, and fields of ``ElasticDistribution``.

    Args:
        command: empty if there is none.
        refused: reasons why the command is not fully equivalent; empty if it is.
        default_count: processes that the launcher starts on each node by default; ``None`` if it was given a number.
    """

    command: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    default_count: int | str | None = None

    @property
    def all_fields(self) -> dict[str, Any]:
        """The fields of ``ElasticDistribution``, with the default count."""
        return ({} if self.default_count is None else {_COUNT: self.default_count}) | dict(self.fields)


def read_launcher(command: str, with_literals: Callable[[str], str] = str) -> Launched | None:
    """Return the equivalent of a command whose program is started by a launcher; ``None`` if it has no launcher.

    Other Python programs in the command are left to the shell.

    Args:
        with_literals: function that puts the values of the job's inputs into the value of an option.
    """
    found: list[tuple[Launched, int, int]] = []
    others: list[int] = []
    for words in simple_commands(command):
        texts = [word.text for word in words]
        call = _call(texts)
        launched = None if call is None else _read(command, words, call, with_literals)
        if launched is not None:
            found.append((launched, words[0].start, words[-1].end))
        elif (position := left_to_the_shell(texts)) is not None:
            others.append(words[position].start)
    if not found:
        return None
    launched, start, end = found[0]
    if len(found) > 1:
        return Launched("", refused=f"It starts {len(found)} of them; submit a job for each program.")
    parts = [(start, end, launched.command), *((position, position, "command ") for position in others)]
    return replace(launched, command=replaced(command, parts)) if launched.command else launched


def refuse_launcher(command: str, given: ElasticDistribution, with_literals: Callable[[str], str] = str) -> None:
    """Check that a shell command starts no launcher.

    Args:
        given: the job's distribution, which the message does not repeat.

    Raises:
        CommandError: the command starts a launcher; the message has the equivalent command.
    """
    launched = read_launcher(command, with_literals)
    if launched is None:
        return
    fields = launched.fields if _COUNT in given.model_fields_set else launched.all_fields
    counts = "".join(
        f" and ElasticDistribution({name}={value!r})"
        for name, value in fields.items()
        if getattr(ElasticDistribution(**{name: value}), name) != getattr(given, name)
    )
    reasons = f" {launched.refused}" if launched.refused else ""
    suggestion = f" Give command={launched.command!r}{counts}." if launched.command else ""
    raise CommandError(
        f"The command {command!r} starts a launcher; the elastic agent takes the launcher's place and starts the "
        f"workers itself.{reasons}{suggestion}"
    )


def _read(command: str, words: Sequence[Word], call: _Call, with_literals: Callable[[str], str]) -> Launched | None:
    """Return the equivalent of the simple command that calls a launcher; ``None`` if a script is no launcher."""
    launcher = call.launcher
    is_script = launcher not in LAUNCHERS  # or a module, which only has the options of a launcher
    options, rest = _options(launcher, words[call.end :], strict=is_script)
    own = sorted(_SCRIPT_OPTIONS & options.keys())
    if is_script and not (own and rest and rest[0].text.endswith(".py")):
        return None
    if not rest:
        return Launched("python train.py", {}, f"{launcher.name} names no program.")
    fields, refused = _fields(launcher, {name: with_literals(value) for name, value in options.items()})
    refused += _refused_options(launcher, options)
    interpreter = "python"
    if call.interpreter > call.start:
        interpreter = command[words[call.start].start : words[call.interpreter - 1].end]
    variables = [
        f"{launcher.variables[name]}={value if '$' in value else shlex.quote(value)}"
        for name, value in options.items()
        if name in launcher.variables
    ]
    # By env, as an assignment would be an argument of what may stand before, such as numactl.
    start = command[words[0].start : words[call.start].start] + (f"env {' '.join(variables)} " if variables else "")
    program, end = rest[0], words[-1].end
    arguments = command[program.end : end]
    default = None if launcher.count in options else "auto" if launcher.one_per_gpu else 1
    if "no-python" in options:
        what = command[program.start : end]
        if is_program(program.text):
            return Launched(f"{start}{what}", fields, " ".join(refused), default)
        return Launched(
            "", {}, f"--no-python starts {what!r}, which is no Python program. Give the one that it starts."
        )
    if launcher.local_rank and launcher.no_local_rank not in options:
        arguments = f" {launcher.local_rank}=$LOCAL_RANK{arguments}"
    if is_script:
        given = " and ".join(f"--{name}" for name in own)
        refused.append(f"{launcher.name!r} is given {given} and {program.text!r}, as a launcher is.")
    module = "-m " if "module" in options else ""
    text = f"{start}{interpreter} {module}{command[program.start : program.end]}{arguments}"
    return Launched(text, fields, " ".join(refused), default)


def _options(launcher: Launcher, words: Sequence[Word], *, strict: bool) -> tuple[dict[str, str], list[Word]]:
    """Return the options by their names, and the words from the program onwards.

    Args:
        strict: whether a script after an unknown option is its value, rather than the program.
    """
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0).text
        if word == "--":
            break
        name, equals, value = word.partition("=")
        option = launcher.short.get(name, name.lstrip("-").replace("_", "-"))
        if not equals and rest and option not in launcher.without_value:
            following = rest[0].text
            known = option in launcher.with_value
            if known or not (following.startswith("-") or (following.endswith(".py") and not strict)):
                value = rest.pop(0).text
        options[option] = value
    return options, rest


def _fields(launcher: Launcher, options: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of the distribution, and why others cannot be determined."""
    fields: dict[str, Any] = {}
    refused: list[str] = []
    for option, name in launcher.fields.items():
        if option in options:
            try:
                fields[name] = int(options[option])
            except ValueError:
                refused.append(f"--{option} {options[option]} cannot be read as a number.")
    if launcher.count not in options:
        return fields, refused
    given, nodes = options[launcher.count], options.get(launcher.nodes, "1")
    per_node = f"Give ElasticDistribution({_COUNT}=...) the number of workers per node."
    if given in _ALL_GPUS:
        fields[_COUNT] = "auto"
    elif not (given.isdecimal() and nodes.isdecimal()) or int(nodes) < 1 or int(given) < 1:
        over = f" over --{launcher.nodes} {nodes}" if launcher.nodes in options else ""
        refused.append(f"--{launcher.count} {given}{over} cannot be read as a count. {per_node}")
    elif int(given) % int(nodes):
        refused.append(f"--{launcher.count} {given} are not equally many on each of {nodes} nodes. {per_node}")
    else:
        fields[_COUNT] = int(given) // int(nodes)
    return fields, refused


def _refused_options(launcher: Launcher, options: Mapping[str, str]) -> list[str]:
    """Return why options cannot be translated."""
    kept = launcher.with_value.union(launcher.flags.split(), (launcher.no_local_rank, "no-python"))
    names = [name for name in options if name not in kept]
    if launcher.library and names:
        given = " ".join(f"--{name} {options[name]}".rstrip() for name in names)
        problem = f"{launcher.name!r} also sets up its library for the script."
        return [f"{problem} Move its options ({given}) to the script or its configuration."]
    return [f"--{name} of {launcher.name} has no equivalent in the agent." for name in names]
