"""Commands that start no Python program in whose place the agent could run: launchers and shells."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from azureml_elastic.config.command.prefixes import is_interpreter

__all__ = [
    "LAUNCHERS",
    "LAUNCHER_MODULES",
    "NEXT_STEP",
    "command_name",
    "instead_of",
    "is_shell_text",
    "no_program",
    "starts_cluster",
]

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
