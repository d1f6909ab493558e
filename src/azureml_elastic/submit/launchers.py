"""Translation of launcher commands, such as ``torchrun --nproc_per_node 4 train.py``.

The agent replaces the launcher, so the program becomes the command, and options such as the number of workers become
fields of the distribution. Options that only the launcher could handle are rejected by name.

Sources of their options: ``torch/distributed/run.py`` of torch 2.13, ``commands/launch.py`` of accelerate 1.14, and
``launcher/runner.py`` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from azureml_elastic.config.command.launchers import is_interpreter, is_program, program_start
from azureml_elastic.config.command.launching import Launching
from azureml_elastic.config.command.program import FoundProgram, left_to_the_shell, parse_program
from azureml_elastic.config.command.shell import Word, simple_commands
from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.errors import CommandError
from azureml_elastic.submit.expressions import with_literals

_COUNT = "process_count_per_instance"
_ALL_GPUS = {"gpu", "auto", "-1"}
_SCRIPT_OPTIONS = frozenset({"nproc-per-node", "nnodes"})
"""Options of which one makes a script a launcher, if another script follows."""


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


def _options_of_table(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RESTARTS = {"max-restarts": "max_restarts", "monitor-interval": "monitor_interval"}
_TORCHRUN = Launcher(
    "torchrun",
    fields=_RESTARTS,
    dropped=_options_of_table(
        "nnodes node-rank master-addr master-port local-addr rdzv-backend rdzv-endpoint rdzv-id rdzv-conf"
    ),
    flags=_options_of_table("standalone use-env module run-path"),
    refused=_options_of_table(
        "start-method event-log-handler role log-dir redirects tee local-ranks-filter logs-specs numa-binding "
        "duplicate-stdout-filters duplicate-stderr-filters signals-to-handle shutdown-timeout"
    ),
    refused_flags=_options_of_table("no-python virtual-local-rank"),
    short={"-m": "module", "-r": "redirects", "-t": "tee"},
)
_TORCH_LAUNCH = replace(_TORCHRUN, name="torch.distributed.launch", local_rank="--local-rank", no_local_rank="use-env")
_ACCELERATE = Launcher(
    "accelerate launch",
    count="num-processes",
    nodes="num-machines",
    fields=_RESTARTS,
    variables={"mixed-precision": "ACCELERATE_MIXED_PRECISION", "num-cpu-threads-per-process": "OMP_NUM_THREADS"},
    dropped=_options_of_table("machine-rank main-process-ip main-process-port rdzv-backend rdzv-conf"),
    flags=_options_of_table("multi-gpu same-network module quiet"),
    refused=_options_of_table(
        "config-file gpu-ids dynamo-backend dynamo-mode log-dir tee role deepspeed-config-file zero-stage"
    ),
    refused_flags=_options_of_table(
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
    dropped=_options_of_table(
        "hostfile num-nodes master-port master-addr node-rank launcher launcher-args ssh-port log-level"
    ),
    flags=_options_of_table("module no-ssh no-ssh-check force-multi quiet no-local-rank"),
    refused=_options_of_table("include exclude autotuning enable-each-rank-log bind-core-list venv-script"),
    refused_flags=_options_of_table("no-python save-pid bind-cores-to-rank elastic-training"),
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


@dataclass(frozen=True)
class Launched:
    """The equivalent of a command with a launcher: the command without it, and fields of ``ElasticDistribution``."""

    command: str
    """Empty if there is none."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    """Reasons why the command is not fully equivalent; empty if it is."""
    default_count: int | str | None = None
    """Processes that the launcher starts on each node by default; ``None`` if it was given their number."""

    @property
    def all_fields(self) -> dict[str, Any]:
        """The fields of ``ElasticDistribution``, with the default count."""
        return ({} if self.default_count is None else {_COUNT: self.default_count}) | dict(self.fields)


def read_launcher(command: str, inputs: Mapping[str, Any] | None = None) -> Launched | None:
    """Return the equivalent of a command whose program is started by a launcher; ``None`` if it has no launcher.

    Other Python programs in the command are left to the shell.

    Args:
        inputs: inputs of the job, whose literals may be values of the launcher's options.
    """
    found: list[tuple[Launched, int, int]] = []
    others: list[int] = []
    for words in simple_commands(command):
        call = launcher_call([word.text for word in words])
        launched = None if call is None else _read(command, words, call, inputs or {})
        if launched is not None:
            found.append((launched, words[0].start, words[-1].end))
        elif (position := left_to_the_shell([word.text for word in words])) is not None:
            others.append(words[position].start)
    if not found:
        return None
    launched, start, end = found[0]
    if len(found) > 1:
        return Launched("", refused=f"It starts {len(found)} of them; submit a job for each program.")
    if not launched.command:
        return launched
    before, after = _marked(command, others, 0, start), _marked(command, others, end, len(command))
    return replace(launched, command=f"{before}{launched.command}{after}")


def refuse_launcher(
    command: str, inputs: Mapping[str, Any] | None = None, distribution: ElasticDistribution | None = None
) -> None:
    """Check that a shell command starts no launcher.

    Args:
        distribution: the job's distribution, which the message does not repeat.

    Raises:
        CommandError: the command starts a launcher; the message has the equivalent command.
    """
    launched = read_launcher(command, inputs)
    if launched is None:
        return
    given = distribution or ElasticDistribution()
    fields = launched.fields if _COUNT in given.model_fields_set else launched.all_fields
    missing = {name: value for name, value in fields.items() if not _equals(given, name, value)}
    counts = "".join(f" and ElasticDistribution({name}={value!r})" for name, value in missing.items())
    reasons = f" {launched.refused}" if launched.refused else ""
    suggestion = f" Give command={launched.command!r}{counts}." if launched.command else ""
    raise CommandError(
        f"The command {command!r} starts a launcher; the elastic agent takes the launcher's place and starts the "
        f"workers itself.{reasons}{suggestion}"
    )


def without_launcher(found: FoundProgram, launching: Launching) -> str:
    """Return a command that starts the program that a launcher is given."""
    program = parse_program([found.program])
    words = next(simple_commands(found.program))
    first = len(words) - len(program.arguments)
    given = words[first + launching.argument]
    launcher = 2 if program.kind == "module" else 1  # words that name it
    interpreter = found.program[: words[first - launcher].start] or "python "
    # The value of an option may be in the option's word.
    start = given.start if given.text == launching.given else given.end - len(launching.given)
    module = "-m " if launching.is_module else ""
    return f"{found.before}{interpreter}{module}{found.program[start:]}{found.after}"


def _equals(given: ElasticDistribution, name: str, value: Any) -> bool:
    return bool(getattr(ElasticDistribution(**{name: value}), name) == getattr(given, name))


def _marked(command: str, positions: Sequence[int], start: int, end: int) -> str:
    """Return a part of a command in which the shell itself runs the commands at these positions."""
    text = ""
    for position in positions:
        if start <= position < end:
            text += f"{command[start:position]}command "
            start = position
    return text + command[start:end]


def _read(command: str, words: Sequence[Word], call: LauncherCall, inputs: Mapping[str, Any]) -> Launched | None:
    """Return the equivalent of the simple command that calls a launcher; ``None`` if a script is no launcher."""
    launcher = call.launcher
    options, rest = _options(launcher, words[call.end :], strict=call.is_script)
    if call.is_script and not (_SCRIPT_OPTIONS & options.keys() and rest and rest[0].text.endswith(".py")):
        return None
    if not rest:
        return Launched("python train.py", {}, f"{launcher.name} names no program.")
    values = {name: with_literals(value, inputs) for name, value in options.items()}
    fields, refused = _fields(launcher, values)
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
    program, arguments = rest[0], command[rest[0].end : words[-1].end]
    default = None if launcher.count in options else "auto" if launcher.one_per_gpu else 1
    if "no-python" in options:
        if not is_program(program.text):
            what = command[program.start : words[-1].end]
            return Launched(
                "", {}, f"--no-python starts {what!r}, which is no Python program. Give the one that it starts."
            )
        return Launched(f"{start}{command[program.start : words[-1].end]}", fields, " ".join(refused), default)
    if launcher.local_rank and launcher.no_local_rank not in options:
        arguments = f" {launcher.local_rank}=$LOCAL_RANK{arguments}"
    if call.is_script:
        given = " and ".join(f"--{name}" for name in sorted(_SCRIPT_OPTIONS & options.keys()))
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
        known = option in launcher.with_value
        if not equals and rest and option not in launcher.without_value:
            following = rest[0].text
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
                fields[name] = float(options[option]) if name == "monitor_interval" else int(options[option])
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
    kept = launcher.with_value - launcher.refused | launcher.flags | {launcher.no_local_rank, "no-python"}
    names = [name for name in options if name not in kept]
    if launcher.library and names:
        given = " ".join(f"--{name} {options[name]}".rstrip() for name in names)
        problem = f"{launcher.name!r} also sets up its library for the script."
        return [f"{problem} Move its options ({given}) to the script or its configuration."]
    return [f"--{name} of {launcher.name} has no equivalent in the agent." for name in names]
