"""Words of a simple command that stand before its program: assignments, keywords of the shell, and other commands.

Of commands that start another command, such as ``numactl -N 0 python train.py``, the agent takes the place of the
program behind them. Most apply to the agent and so to its workers; those that do not have a reason to be refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAME = r"python(?:\d+(?:\.\d+)*)?"
_INTERPRETER = re.compile(
    rf"(?:.*[/\\])?{_NAME}(?:\.exe)?|\$\((?:which|command\s+-v)\s+{_NAME}\s*\)|`which\s+{_NAME}\s*`", re.DOTALL
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_KEYWORDS = frozenset({"!", "do", "elif", "else", "if", "then", "{"})
_OBSERVERS = frozenset(
    {
        *("coverage run", "gdb", "kernprof", "ltrace", "memray run", "ncu", "nsys profile", "nvprof", "perf record"),
        *("py-spy record", "py-spy top", "rocprof", "scalene", "strace", "valgrind", "viztracer"),
    }
)
_CONDA = "-n --name -p --prefix --cwd -e --env -a --attach -r --root-prefix"
_PREFIXES = {
    **dict.fromkeys((*_KEYWORDS, *_OBSERVERS), ""),
    **dict.fromkeys(("nohup", "setsid", "taskset", "hatch run", "pdm run", "pipenv run", "poetry run"), ""),
    **dict.fromkeys(("conda run", "mamba run", "micromamba run"), _CONDA),
    "env": "-u --unset -C --chdir",
    "exec": "-a",
    "ionice": "-c --class -n --classdata",
    "nice": "-n --adjustment",
    "numactl": "-N --cpunodebind -C --physcpubind -m --membind -i --interleave -p --preferred -w --weighted-interleave",
    "pixi run": "-e --environment --manifest-path",
    "stdbuf": "-i --input -o --output -e --error",
    "sudo": "-u --user -g --group -p --prompt -C --close-from -D --chdir -R --chroot -T --command-timeout",
    "time": "-o --output -f --format",
    "timeout": "-k --kill-after -s --signal",
    "uv run": "-p --python --with --with-editable --with-requirements --extra --group --only-group --no-group "
    "--project --directory --package --env-file --index --default-index --cache-dir --config-file",
    "xvfb-run": "-n --server-num -s --server-args -e --error-file -f --auth-file -p --xauth-protocol",
}
"""What may stand before a program, of one word or two, with its options whose value is the next word."""

_OPERANDS = {"taskset": 1, "timeout": 1}
"""Numbers of words between the options and the command."""

_EMPTIES = frozenset({"-", "-i", "--ignore-environment", "-S", "--split-string"})
"""Options of ``env`` with which alone it is a problem."""

_NO_PLAN = "would start the agent without the environment variables that have the job's plan. Leave it out"
_PROBLEMS = {
    "env": _NO_PLAN,
    "sudo": f"{_NO_PLAN}: the containers of Azure ML run as root",
    "timeout": "would end the agent of each node by itself, which the others take for a preemption. Leave it out, and "
    "give the job timeout=..., in seconds",
    **dict.fromkeys(
        _OBSERVERS,
        "would observe the agent of each node, not the workers that it forks and starts again. Leave it out; for a "
        "profile of chosen steps and ranks give profile=Profile(...)",
    ),
}
"""Why a prefix cannot apply to the agent, with what to do."""


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


def program_start(words: Sequence[str]) -> tuple[int, str]:
    """Return where the program behind assignments, keywords and prefixes starts, and why the agent cannot start there.

    Returns:
        The number of words before the program; and the reason, with what to do, empty if it can.
    """
    position, problem = 0, ""
    while position < len(words):
        if is_assignment(words[position]):
            position += 1
            continue
        name = words[position].rsplit("/", 1)[-1]
        names = (name, " ".join((name, *words[position + 1 : position + 2])))
        prefix = next((name for name in names if name in _PREFIXES), None)
        if prefix is None:
            break
        start = position + len(prefix.split())
        position = _end(prefix, words, start)
        if prefix in _PROBLEMS and (
            prefix != "env" or any(each.partition("=")[0] in _EMPTIES for each in words[start:position])
        ):
            problem = problem or f"{prefix!r} {_PROBLEMS[prefix]}"
    return position, problem


def _end(prefix: str, words: Sequence[str], position: int) -> int:
    """Return where the words of a prefix end."""
    if prefix in _OBSERVERS:  # the command is behind options of any kind
        return next((at for at in range(position, len(words)) if is_program(words[at])), len(words))
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        position += 2 if word in _PREFIXES[prefix].split() else 1
        if word == "--":
            break
    return min(position + _OPERANDS.get(prefix, 0), len(words))
