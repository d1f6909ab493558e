"""The launchers that are known: how each is called, what becomes of its options, and what takes its place.

Sources of their options: ``torch/distributed/run.py`` of torch 2.13, ``commands/launch.py`` of accelerate 1.14, and
``launcher/runner.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from azureml_elastic.program.prefixes import is_interpreter

NEXT_STEP = "Give the script itself, as in 'python train.py --epochs 10' or 'python -m package.module'"


@dataclass(frozen=True)
class Launcher:
    """A launcher, and what becomes of its options. Names of options have no leading hyphens, and hyphens inside.

    Args:
        calls: commands that call it, without interpreter and folder.
        other_names: further commands and modules that are it, or start a part of its cluster, and are not translated.
        framework: engine that the agent starts in its place; empty for workers alone.
        count: option with the number of processes: on a node, or on as many as the option ``nodes`` has.
        fields: options that are fields of ``ElasticDistribution``.
        variables: options that the script receives as environment variables.
        dropped: other options with a value that the agent does not need, and ``flags`` without one.
        refused: further options without a value; whatever has no place here is refused, too.
        local_rank: argument in which the script receives its local rank, unless ``no_local_rank`` is given.
        one_per_gpu: whether it starts one process per GPU without ``count``, rather than a single one.
        library: whether options configure a library that the script uses, too.
    """

    name: str
    calls: tuple[str, ...] = ()
    other_names: str = ""
    framework: str = ""
    count: str = "nproc-per-node"
    nodes: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    dropped: str = ""
    flags: str = ""
    refused: str = "no-python"
    short: Mapping[str, str] = field(default_factory=dict)
    local_rank: str = ""
    no_local_rank: str = ""
    one_per_gpu: bool = False
    library: bool = False

    @property
    def with_value(self) -> frozenset[str]:
        """Options with a value that have an equivalent or need none."""
        return frozenset({self.count, self.nodes, *self.fields, *self.variables, *self.dropped.split()})

    @property
    def without_value(self) -> frozenset[str]:
        """Options without one."""
        return frozenset({self.no_local_rank, *self.flags.split(), *self.refused.split()})

    @property
    def names(self) -> tuple[str, ...]:
        """The commands and modules that are it."""
        return *(call.removeprefix("-m ").split()[0] for call in self.calls), *self.other_names.split()


_RESTARTS = {"max-restarts": "max_restarts"}
TORCHRUN = Launcher(
    "torchrun",
    ("torchrun", "-m torch.distributed.run"),
    fields=_RESTARTS,
    dropped="monitor-interval nnodes node-rank master-addr master-port local-addr rdzv-backend rdzv-endpoint rdzv-id "
    "rdzv-conf",
    flags="standalone use-env module run-path",
    refused="no-python virtual-local-rank",
    short={"-m": "module", "-r": "redirects", "-t": "tee"},
)
LAUNCHERS = (
    TORCHRUN,
    replace(
        TORCHRUN,
        name="torch.distributed.launch",
        calls=("-m torch.distributed.launch",),
        local_rank="--local-rank",
        no_local_rank="use-env",
    ),
    Launcher(
        "accelerate launch",
        (
            *("accelerate launch", "-m accelerate launch", "-m accelerate.commands.launch"),
            "-m accelerate.commands.accelerate_cli launch",
        ),
        count="num-processes",
        nodes="num-machines",
        fields=_RESTARTS,
        variables={"mixed-precision": "ACCELERATE_MIXED_PRECISION", "num-cpu-threads-per-process": "OMP_NUM_THREADS"},
        dropped="machine-rank monitor-interval main-process-ip main-process-port rdzv-backend rdzv-conf",
        flags="multi-gpu same-network module quiet",
        refused="no-python cpu debug enable-cpu-affinity use-deepspeed use-fsdp use-megatron-lm "
        "use-parallelism-config dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation "
        "fp8-use-autocast-during-eval downcast-bf16 tpu tpu-cluster no-tpu-cluster tpu-use-sudo",
        short={"-m": "module", "-q": "quiet"},
        one_per_gpu=True,
        library=True,
    ),
    Launcher(
        "deepspeed",
        ("deepspeed", "-m deepspeed", "-m deepspeed.launcher.runner"),
        "deepspeed.launcher.launch",
        count="num-gpus",
        dropped="hostfile num-nodes master-port master-addr node-rank launcher launcher-args ssh-port log-level",
        flags="module no-ssh no-ssh-check force-multi quiet no-local-rank",
        refused="no-python save-pid bind-cores-to-rank elastic-training",
        short={"-H": "hostfile", "-i": "include", "-e": "exclude", "-q": "quiet", "--num_accelerators": "num-gpus"},
        local_rank="--local_rank",
        no_local_rank="no-local-rank",
        one_per_gpu=True,
    ),
    Launcher("MPI or Slurm", other_names="mpiexec mpirun srun"),
    Launcher(
        "dask",
        other_names="dask dask-scheduler dask-worker distributed.cli.dask_scheduler distributed.cli.dask_worker",
        framework="dask",
    ),
    Launcher("horovodrun", other_names="horovodrun horovod.runner horovod.runner.launch", framework="horovod"),
    Launcher("ray", other_names="ray ray.scripts.scripts", framework="ray"),
)
CALLS = {tuple(call.split()): launcher for launcher in LAUNCHERS for call in launcher.calls}
"""How a launcher is called, in words."""

NAMES = {name: launcher for launcher in LAUNCHERS for name in launcher.names}
"""Commands and modules that are launchers."""


_OF_CLUSTERS = (("dask", "scheduler"), ("dask", "worker"), ("ray", "start"))


def command_name(words: Sequence[str]) -> str:
    """Return the name of a command without its folder."""
    return words[0].rsplit("/", 1)[-1]


def starts_cluster(words: Sequence[str]) -> bool:
    """Return whether a command starts a part of a cluster, as ``ray start --head`` does."""
    name = command_name(words)
    return name in ("dask-scheduler", "dask-worker") or (name, *words[1:2]) in _OF_CLUSTERS


def instead_of(launcher: str, words: Sequence[str]) -> str:
    """Return what to write in the place of a launcher's command with these arguments."""
    start = next((index for index, word in enumerate(words) if is_interpreter(word)), None)
    step = NEXT_STEP if start is None else f"Write {shlex.join(words[start:])!r}"
    framework = NAMES[launcher].framework if launcher in NAMES else ""
    if not framework:
        return f"the elastic agent takes the launcher's place and starts the workers. {step}."
    if framework == "horovod":
        return f'with ElasticDistribution(framework="horovod") the elastic agent starts the workers. {step}.'
    return (
        f'with ElasticDistribution(framework="{framework}") the elastic agent starts the cluster. Give the program '
        "that uses it, as in 'python search.py'."
    )
