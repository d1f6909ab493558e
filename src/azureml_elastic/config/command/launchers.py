"""Commands that start no Python program in whose place the agent could run: launchers and shells.

Of commands that start another command, such as ``numactl -N 0 python train.py``, the agent takes the place of the
program behind them. Most apply to the agent and so to its workers; those that do not
have a reason to be refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "LAUNCHERS",
    "LAUNCHER_MODULES",
    "NEXT_STEP",
    "Start",
    "command_name",
    "instead_of",
    "is_assignment",
    "is_interpreter",
    "is_keyword",
    "is_program",
    "is_shell_text",
    "no_program",
    "program_start",
    "starts_cluster",
]

_NAME = r"python(?:\d+(?:\.\d+)*)?"
_INTERPRETER = re.compile(
    rf"(?:.*[/\\])?{_NAME}(?:\.exe)?|\$\((?:which|command\s+-v)\s+{_NAME}\s*\)|`which\s+{_NAME}\s*`", re.DOTALL
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)

_KEYWORDS = frozenset({"!", "do", "elif", "else", "if", "then", "{"})

_WORKERS_APART = (
    "would observe the agent of each node, not the workers that it forks and starts again. Leave it out; for a profile "
    "of chosen steps and ranks give profile=Profile(...)"
)
_NO_PLAN = "would start the agent without the environment variables that have the job's plan. Leave it out"

_ENGINES = {
    **dict.fromkeys(("dask", "dask-scheduler", "dask-worker"), "dask"),
    **dict.fromkeys(("distributed.cli.dask_scheduler", "distributed.cli.dask_worker"), "dask"),
    **dict.fromkeys(("horovodrun", "horovod.runner", "horovod.runner.launch"), "horovod"),
    **dict.fromkeys(("ray", "ray.scripts.scripts"), "ray"),
}
"""Commands and modules in whose place the agent runs an engine, and the framework to choose for it."""

LAUNCHERS = frozenset({*_ENGINES, "accelerate", "deepspeed", "mpiexec", "mpirun", "srun", "torchrun"})
LAUNCHER_MODULES = frozenset(
    {
        *("accelerate", "accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
        *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner"),
        *_ENGINES,
        *("torch.distributed.launch", "torch.distributed.run"),
    }
)
_SHELLS = frozenset({"bash", "dash", "sh", "zsh"})

NEXT_STEP = "Give the script itself, as in 'python train.py --epochs 10' or 'python -m package.module'"


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


_PLAIN = _Prefix()
_OBSERVER = _Prefix(problem=_WORKERS_APART, anywhere=True)
_CONDA = _Prefix("-n --name -p --prefix --cwd -e --env -a --attach -r --root-prefix")

_PREFIXES: dict[tuple[str, ...], _Prefix] = {
    **{(word,): _PLAIN for word in _KEYWORDS},
    **dict.fromkeys([("nohup",), ("setsid",), ("pdm", "run"), ("pipenv", "run"), ("poetry", "run")], _PLAIN),
    **dict.fromkeys([("conda", "run"), ("mamba", "run"), ("micromamba", "run")], _CONDA),
    ("env",): _Prefix(
        "-u --unset -C --chdir", problem=_NO_PLAN, problem_options="- -i --ignore-environment -S --split-string"
    ),
    ("exec",): _Prefix("-a"),
    ("hatch", "run"): _PLAIN,
    ("ionice",): _Prefix("-c --class -n --classdata"),
    ("nice",): _Prefix("-n --adjustment"),
    ("numactl",): _Prefix(
        "-N --cpunodebind -C --physcpubind -m --membind -i --interleave -p --preferred -w --weighted-interleave"
    ),
    ("pixi", "run"): _Prefix("-e --environment --manifest-path"),
    ("stdbuf",): _Prefix("-i --input -o --output -e --error"),
    ("taskset",): _Prefix(operands=1),
    ("time",): _Prefix("-o --output -f --format"),
    ("uv", "run"): _Prefix(
        "-p --python --with --with-editable --with-requirements --extra --group --only-group --no-group --project "
        "--directory --package --env-file --index --default-index --cache-dir --config-file"
    ),
    ("xvfb-run",): _Prefix("-n --server-num -s --server-args -e --error-file -f --auth-file -p --xauth-protocol"),
    ("sudo",): _Prefix(
        "-u --user -g --group -p --prompt -C --close-from -D --chdir -R --chroot -T --command-timeout",
        problem=f"{_NO_PLAN}: the containers of Azure ML run as root",
    ),
    ("timeout",): _Prefix(
        "-k --kill-after -s --signal",
        operands=1,
        problem="would end the agent of each node by itself, which the others take for a preemption. Leave it out, and "
        "give the job timeout=..., in seconds",
    ),
    **dict.fromkeys([("nsys", "profile"), ("ncu",), ("nvprof",), ("rocprof",), ("perf", "record")], _OBSERVER),
    **dict.fromkeys(
        [("py-spy", "record"), ("py-spy", "top"), ("scalene",), ("viztracer",), ("memray", "run")], _OBSERVER
    ),
    **dict.fromkeys([("strace",), ("ltrace",), ("gdb",), ("valgrind",), ("coverage", "run"), ("kernprof",)], _OBSERVER),
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
        names = (words[position].rsplit("/", 1)[-1], *words[position + 1 : position + 2])
        key = next((key for key in (names[:1], names) if key in _PREFIXES), None)
        if key is None:
            break
        end, applies = _end(_PREFIXES[key], words, position + len(key))
        if not applies and not problem:
            problem = f"{' '.join(key)!r} {_PREFIXES[key].problem}"
        position = end
    return Start(position, problem)


def _end(prefix: _Prefix, words: Sequence[str], position: int) -> tuple[int, bool]:
    """Return where the words of a prefix end, and whether it can apply to the agent."""
    applies = not prefix.problem or bool(prefix.problem_options)
    if prefix.anywhere:
        found = (at for at in range(position, len(words)) if is_program(words[at]))
        return next(found, len(words)), applies
    with_value = prefix.values.split()
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        applies = applies and word.partition("=")[0] not in prefix.problem_options.split()
        position += 2 if word in with_value else 1
        if word == "--":
            break
    return min(position + prefix.operands, len(words)), applies


def is_shell_text(words: Sequence[str]) -> bool:
    """Return whether a command is a shell that runs a text, as ``bash -c`` does."""
    options = [word for word in words[1:3] if word.startswith("-") and not word.startswith("--")]
    return words[0].rsplit("/", 1)[-1] in _SHELLS and any("c" in word for word in options)


def no_program(words: Sequence[str]) -> str:
    """Return why a command without a program is refused, and what to write instead."""
    if not words:
        return f"The command starts no Python program. {NEXT_STEP}."
    text = f"The command {shlex.join(words)!r} starts no Python program"
    if command_name(words) in LAUNCHERS:
        return f"{text} but the launcher {words[0]!r}; {instead_of(command_name(words), words[1:])}"
    if is_shell_text(words):
        return (
            f"{text} but a shell of its own, whose program the agent cannot find. Give what follows -c as the command."
        )
    if any(is_interpreter(word) for word in words[1:]):
        return (
            f"{text} in whose place the agent could run: it is not known whether {words[0]!r} can start the agent. "
            f"Leave {words[0]!r} out. {NEXT_STEP}."
        )
    return f"{text}; the elastic agent has to start, watch and restart the workers itself. {NEXT_STEP}."


def command_name(words: Sequence[str]) -> str:
    """Return the name of a command without its folder."""
    return words[0].rsplit("/", 1)[-1]


def starts_cluster(words: Sequence[str]) -> bool:
    """Return whether a command starts a part of a cluster, as ``ray start --head`` does."""
    return [command_name(words), *words[1:2]] in (["dask", "scheduler"], ["dask", "worker"], ["ray", "start"]) or (
        command_name(words) in ("dask-scheduler", "dask-worker")
    )


def instead_of(launcher: str, words: Sequence[str]) -> str:
    """Return what to write in the place of a launcher's command with these arguments."""
    start = next((index for index, word in enumerate(words) if is_interpreter(word)), None)
    step = NEXT_STEP if start is None else f"Write {shlex.join(words[start:])!r}"
    framework = _ENGINES.get(launcher)
    if framework is None:
        return f"the elastic agent takes the launcher's place and starts the workers. {step}."
    if framework == "horovod":
        return f'with ElasticDistribution(framework="horovod") the elastic agent starts the workers. {step}.'
    return (
        f'with ElasticDistribution(framework="{framework}") the elastic agent starts the cluster. Give the program '
        "that uses it, as in 'python search.py'."
    )
