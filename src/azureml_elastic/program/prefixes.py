"""Words of a simple command that stand before its program: assignments, keywords of the shell, and other commands.

Of commands that start another command, such as ``numactl -N 0 python train.py``, the agent takes the place of the
program behind them. Most apply to the agent and so to its workers; those that do not have a reason to be refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NAME = r"python(?:\d+(?:\.\d+)*)?"
_INTERPRETER = re.compile(
    rf"(?:.*[/\\])?{_NAME}(?:\.exe)?|\$\((?:which|command\s+-v)\s+{_NAME}\s*\)|`which\s+{_NAME}\s*`", re.DOTALL
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_KEYWORDS = frozenset({"!", "do", "elif", "else", "if", "then", "{"})
_NO_PLAN = "would start the agent without the environment variables that have the job's plan. Leave it out"


@dataclass(frozen=True)
class _Prefix:
    """How the words of a prefix end.

    Args:
        values: options whose value is the next word, separated by spaces.
        operands: number of words between the options and the command.
        problem: why the prefix cannot apply to the agent, with what to do; empty if it can.
        problem_options: options with which alone this problem exists; empty for all.
        anywhere: whether the command is searched behind options of any kind.
    """

    values: str = ""
    operands: int = 0
    problem: str = ""
    problem_options: str = ""
    anywhere: bool = False


_PLAIN = (*_KEYWORDS, "nohup", "setsid", "hatch run", "pdm run", "pipenv run", "poetry run")
_OBSERVERS = (
    *("nsys profile", "ncu", "nvprof", "rocprof", "perf record", "py-spy record", "py-spy top", "scalene", "viztracer"),
    *("memray run", "strace", "ltrace", "gdb", "valgrind", "coverage run", "kernprof"),
)
_PREFIXES = {
    **dict.fromkeys(_PLAIN, _Prefix()),
    **dict.fromkeys(
        ("conda run", "mamba run", "micromamba run"),
        _Prefix("-n --name -p --prefix --cwd -e --env -a --attach -r --root-prefix"),
    ),
    "env": _Prefix(
        "-u --unset -C --chdir", problem=_NO_PLAN, problem_options="- -i --ignore-environment -S --split-string"
    ),
    "exec": _Prefix("-a"),
    "ionice": _Prefix("-c --class -n --classdata"),
    "nice": _Prefix("-n --adjustment"),
    "numactl": _Prefix(
        "-N --cpunodebind -C --physcpubind -m --membind -i --interleave -p --preferred -w --weighted-interleave"
    ),
    "pixi run": _Prefix("-e --environment --manifest-path"),
    "stdbuf": _Prefix("-i --input -o --output -e --error"),
    "taskset": _Prefix(operands=1),
    "time": _Prefix("-o --output -f --format"),
    "uv run": _Prefix(
        "-p --python --with --with-editable --with-requirements --extra --group --only-group --no-group --project "
        "--directory --package --env-file --index --default-index --cache-dir --config-file"
    ),
    "xvfb-run": _Prefix("-n --server-num -s --server-args -e --error-file -f --auth-file -p --xauth-protocol"),
    "sudo": _Prefix(
        "-u --user -g --group -p --prompt -C --close-from -D --chdir -R --chroot -T --command-timeout",
        problem=f"{_NO_PLAN}: the containers of Azure ML run as root",
    ),
    "timeout": _Prefix(
        "-k --kill-after -s --signal",
        operands=1,
        problem="would end the agent of each node by itself, which the others take for a preemption. Leave it out, and "
        "give the job timeout=..., in seconds",
    ),
    **dict.fromkeys(
        _OBSERVERS,
        _Prefix(
            problem="would observe the agent of each node, not the workers that it forks and starts again. Leave it "
            "out; for a profile of chosen steps and ranks give profile=Profile(...)",
            anywhere=True,
        ),
    ),
}


class Start(NamedTuple):
    """Where a simple command starts its program."""

    position: int
    """Number of words before the program."""
    problem: str = ""
    """Why the agent cannot take the program's place, with what to do; empty if it can."""


def is_assignment(word: str) -> bool:
    """Return whether a word assigns a variable of the shell."""
    return _ASSIGNMENT.match(word) is not None


def is_keyword(word: str) -> bool:
    """Return whether a word is a keyword of the shell that stands before a command."""
    return word in _KEYWORDS


def is_interpreter(word: str) -> bool:
    """Return whether a word is a Python interpreter."""
    return _INTERPRETER.fullmatch(word) is not None


def is_program(word: str) -> bool:
    """Return whether a word starts a Python program: an interpreter or a script."""
    return is_interpreter(word) or word.endswith(".py")


def program_start(words: Sequence[str]) -> Start:
    """Return where the program behind assignments, keywords of the shell and prefixes starts."""
    position, problem = 0, ""
    while position < len(words):
        if is_assignment(words[position]):
            position += 1
            continue
        # A prefix is one word, such as nice, or two, such as poetry run.
        name = words[position].rsplit("/", 1)[-1]
        keys = (name, " ".join((name, *words[position + 1 : position + 2])))
        key = next((key for key in keys if key in _PREFIXES), "")
        if not key:
            break
        position, applies = _end(_PREFIXES[key], words, position + len(key.split()))
        if not applies and not problem:
            problem = f"{key!r} {_PREFIXES[key].problem}"
    return Start(position, problem)


def _end(prefix: _Prefix, words: Sequence[str], position: int) -> tuple[int, bool]:
    """Return where the words of a prefix end, and whether it can apply to the agent."""
    applies = not prefix.problem or bool(prefix.problem_options)
    if prefix.anywhere:
        return next((at for at in range(position, len(words)) if is_program(words[at])), len(words)), applies
    with_value = prefix.values.split()
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        applies = applies and word.partition("=")[0] not in prefix.problem_options.split()
        position += 2 if word in with_value else 1
        if word == "--":
            break
    return min(position + prefix.operands, len(words)), applies
