"""The launchers that commands start, with their options.

Sources: ``torch/distributed/run.py`` of torch 2.13, ``commands/launch.py`` of accelerate 1.14, and
``launcher/runner.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from azureml_elastic.config.command.prefixes import is_interpreter, program_start

__all__ = ["LAUNCHERS", "Launcher", "LauncherCall", "launcher_call"]


@dataclass(frozen=True)
class Launcher:
    """A launcher, and what becomes of its options. Names of options have no leading hyphens, and hyphens inside.

    Args:
        name: name in messages.
        count: option with the number of processes.
        nodes: option with the number of nodes, if ``count`` is the number over all of them; otherwise empty.
        fields: options that are fields of ``ElasticDistribution``.
        variables: options that the script receives as environment variables.
        dropped: options with a value that the agent does not need.
        flags: options without a value that the agent does not need.
        refused: other options with a value.
        refused_flags: other options without a value.
        short: short forms of options.
        local_rank: argument in which the script receives its local rank; empty if it does not.
        no_local_rank: option that omits this argument.
        one_per_gpu: whether it starts one process per GPU without ``count``, rather than a single one.
        library: whether options configure a library that the script uses, too.
    """

    name: str
    count: str = "nproc-per-node"
    nodes: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    refused_flags: frozenset[str] = frozenset({"no-python"})
    short: Mapping[str, str] = field(default_factory=dict)
    local_rank: str = ""
    no_local_rank: str = ""
    one_per_gpu: bool = False
    library: bool = False

    @property
    def with_value(self) -> frozenset[str]:
        """Options with a value."""
        return frozenset({self.count, self.nodes, *self.fields, *self.variables, *self.dropped, *self.refused})

    @property
    def without_value(self) -> frozenset[str]:
        """Options without one."""
        return self.flags | self.refused_flags | {self.no_local_rank}


def _options(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RESTARTS = {"max-restarts": "max_restarts", "monitor-interval": "monitor_interval"}
_TORCHRUN = Launcher(
    "torchrun",
    fields=_RESTARTS,
    dropped=_options(
        "nnodes node-rank master-addr master-port local-addr rdzv-backend rdzv-endpoint rdzv-id rdzv-conf"
    ),
    flags=_options("standalone use-env module run-path"),
    refused=_options(
        "start-method event-log-handler role log-dir redirects tee local-ranks-filter logs-specs numa-binding "
        "duplicate-stdout-filters duplicate-stderr-filters signals-to-handle shutdown-timeout"
    ),
    refused_flags=_options("no-python virtual-local-rank"),
    short={"-m": "module", "-r": "redirects", "-t": "tee"},
)
_TORCH_LAUNCH = replace(_TORCHRUN, name="torch.distributed.launch", local_rank="--local-rank", no_local_rank="use-env")
_ACCELERATE = Launcher(
    "accelerate launch",
    count="num-processes",
    nodes="num-machines",
    fields=_RESTARTS,
    variables={"mixed-precision": "ACCELERATE_MIXED_PRECISION", "num-cpu-threads-per-process": "OMP_NUM_THREADS"},
    dropped=_options("machine-rank main-process-ip main-process-port rdzv-backend rdzv-conf"),
    flags=_options("multi-gpu same-network module quiet"),
    refused=_options(
        "config-file gpu-ids dynamo-backend dynamo-mode log-dir tee role deepspeed-config-file zero-stage"
    ),
    refused_flags=_options(
        "no-python cpu debug enable-cpu-affinity use-deepspeed use-fsdp use-megatron-lm use-parallelism-config "
        "dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation fp8-use-autocast-during-eval "
        "downcast-bf16 tpu tpu-cluster no-tpu-cluster tpu-use-sudo"
    ),
    short={"-m": "module", "-q": "quiet"},
    one_per_gpu=True,
    library=True,
)
_DEEPSPEED = Launcher(
    "deepspeed",
    count="num-gpus",
    dropped=_options("hostfile num-nodes master-port master-addr node-rank launcher launcher-args ssh-port log-level"),
    flags=_options("module no-ssh no-ssh-check force-multi quiet no-local-rank"),
    refused=_options("include exclude autotuning enable-each-rank-log bind-core-list venv-script"),
    refused_flags=_options("no-python save-pid bind-cores-to-rank elastic-training"),
    short={"-H": "hostfile", "-i": "include", "-e": "exclude", "-q": "quiet", "--num_accelerators": "num-gpus"},
    local_rank="--local_rank",
    no_local_rank="no-local-rank",
    one_per_gpu=True,
)

_CALLS = {
    ("torchrun",): _TORCHRUN,
    ("accelerate", "launch"): _ACCELERATE,
    ("deepspeed",): _DEEPSPEED,
    ("-m", "torch.distributed.run"): _TORCHRUN,
    ("-m", "torch.distributed.launch"): _TORCH_LAUNCH,
    ("-m", "accelerate", "launch"): _ACCELERATE,
    ("-m", "accelerate.commands.launch"): _ACCELERATE,
    ("-m", "accelerate.commands.accelerate_cli", "launch"): _ACCELERATE,
    ("-m", "deepspeed"): _DEEPSPEED,
    ("-m", "deepspeed.launcher.runner"): _DEEPSPEED,
}
"""How a launcher is called, without the interpreter and the folder of the launcher."""

LAUNCHERS = (_TORCHRUN, _TORCH_LAUNCH, _ACCELERATE, _DEEPSPEED)

_LOCATED = re.compile(r"\$\((?:which|command\s+-v|type\s+-[pP])\s+([\w-]+)\s*\)|`which\s+([\w-]+)\s*`|(?:.*/)?([\w-]+)")
"""A launcher's name, its path, or a command that prints its path."""


class LauncherCall(NamedTuple):
    """Call of a launcher in the words of a command."""

    launcher: Launcher
    start: int
    """Index of its first word: the interpreter, or the launcher itself."""
    interpreter: int
    """Index after the interpreter's words; ``start`` if there are none."""
    end: int
    """Index after its words."""
    is_script: bool
    """Whether it is a script or module that only has the options of a launcher."""


def launcher_call(words: Sequence[str]) -> LauncherCall | None:
    """Return the call of a launcher in the words of a simple command, or ``None``."""
    start = program_start(words).position
    position = start
    if words[start : start + 1] and is_interpreter(words[start]):
        position += 1
        while position < len(words) and words[position].startswith("-") and words[position] != "-m":
            position += 1
    if position == len(words):
        return None
    match = _LOCATED.fullmatch(words[position])
    name = next((name for name in match.groups() if name), "") if match else words[position]
    rest = (name, *words[position + 1 :])
    for call, launcher in _CALLS.items():
        if rest[: len(call)] == call and (call[0] != "-m" or position > start):
            return LauncherCall(launcher, start, position, position + len(call), is_script=False)
    module = words[position] == "-m" and position > start and len(rest) > 1
    if not module and not words[position].endswith(".py"):
        return None
    end = position + 1 + module
    return LauncherCall(replace(_TORCHRUN, name=words[end - 1]), start, position, end, is_script=True)
