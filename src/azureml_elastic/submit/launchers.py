"""Translation of launcher commands, such as ``torchrun --nproc_per_node 4 train.py``.

The agent replaces the launcher, so the program becomes the command, and options such as the number of workers become
fields of the distribution. Options that only the launcher could handle are rejected by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.config.command.shell import Word, simple_commands
from azureml_elastic.errors import CommandError

__all__ = ["Launched", "read_launcher", "refuse_launcher"]

_PYTHON = re.compile(r"(?:.*/)?python[\d.]*", re.DOTALL)
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_PROGRAMS = {"torchrun": "torchrun", "accelerate": "accelerate launch", "deepspeed": "deepspeed"}
_FIELDS = {
    "nproc-per-node": "process_count_per_instance",
    "max-restarts": "max_restarts",
    "monitor-interval": "monitor_interval",
}
_RENDEZVOUS = frozenset(
    {
        *("nnodes", "node-rank", "master-addr", "master-port", "local-addr"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    }
)
"""Options for the rendezvous of the nodes, which the table replaces."""

_WITHOUT_VALUE = frozenset({"standalone", "use-env", "module", "no-python", "run-path"})
_DROPPED = frozenset({"standalone", "use-env", "module"})
_OTHERS = frozenset(
    {
        *("start-method", "event-log-handler", "role", "log-dir", "redirects", "tee", "local-ranks-filter"),
        *("logs-specs", "numa-binding", "duplicate-stdout-filters", "duplicate-stderr-filters"),
        *("signals-to-handle", "shutdown-timeout", "virtual-local-rank"),
    }
)
_SHORT = {"-m": "module", "-r": "redirects", "-t": "tee"}


@dataclass(frozen=True)
class Launched:
    """The equivalent of a command with a launcher: the command without it, and fields of ``ElasticDistribution``."""

    command: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    """Reasons why the command is not fully equivalent; empty if it is."""


def read_launcher(command: str) -> Launched | None:
    """Return the equivalent of a command whose program is started by a launcher; ``None`` if it has no launcher."""
    for words in simple_commands(command):
        for position in range(len(words)):
            found = _launcher_at(command, words, position)
            if found is not None:
                name, python, rest = found
                return _read(command, name, words[position], python, rest)
            if not re.match(r"[A-Za-z_]\w*=|env$|exec$|nohup$|time$", words[position].text):
                break
    return None


def refuse_launcher(command: str) -> None:
    """Check that a shell command starts no launcher.

    Raises:
        CommandError: the command starts a launcher; the message has the equivalent command.
    """
    launched = read_launcher(command)
    if launched is None:
        return
    counts = "".join(f" and {name}={value!r} to ElasticDistribution" for name, value in launched.fields.items())
    reasons = f" {launched.refused}" if launched.refused else ""
    raise CommandError(
        f"The command {command!r} starts a launcher; the elastic agent takes the launcher's place and starts the "
        f"workers itself.{reasons} Give command={launched.command!r}{counts}."
    )


def _launcher_at(command: str, words: Sequence[Word], position: int) -> tuple[str, str, list[Word]] | None:
    """Return the launcher's name, the interpreter's command without it, and the words after it."""
    first = words[position].text
    rest = list(words[position + 1 :])
    name = _PROGRAMS.get(first.rsplit("/", 1)[-1])
    if name == "accelerate launch":
        return (name, "python", rest[1:]) if rest and rest[0].text == "launch" else None
    if name is not None:
        return name, "python", rest
    if not _PYTHON.fullmatch(first):
        return None
    while rest and rest[0].text.startswith("-") and rest[0].text != "-m":
        rest.pop(0)
    if len(rest) > 1 and rest[0].text == "-m" and rest[1].text in _MODULES:
        return _MODULES[rest[1].text], command[words[position].start : rest[0].start].rstrip(" \t\r\n\\"), rest[2:]
    return None


def _read(command: str, name: str, first: Word, python: str, words: list[Word]) -> Launched:
    if name in {"accelerate launch", "deepspeed"}:
        return _of_another_library(command, name, first, python, words)
    options, rest = _options(words)
    module = "-m " if "module" in options else ""
    if not rest:
        return Launched("python train.py", {}, f"{name} names no program.")
    corrected = f"{command[: first.start]}{python} {module}{command[rest[0].start :]}"
    fields: dict[str, Any] = {}
    refused: list[str] = []
    for option, value in options.items():
        if option in _FIELDS:
            read = _number(option, value)
            if read is None:
                refused.append(f"--{option} {value} cannot be read as a count.")
            else:
                fields[_FIELDS[option]] = read
        elif option not in _RENDEZVOUS and option not in _DROPPED:
            refused.append(f"--{option} of {name} has no equivalent in the agent.")
    if name == "torch.distributed.launch" and "use-env" not in options:
        refused.append("The script gets no --local-rank: read os.environ['LOCAL_RANK'] in it instead.")
    return Launched(corrected, fields, " ".join(refused))


def _options(words: list[Word]) -> tuple[dict[str, str], list[Word]]:
    """Return the options by their long names, and the words from the program onwards."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0).text
        if word == "--":
            break
        name, equals, value = word.partition("=")
        option = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
        known = option in _FIELDS or option in _RENDEZVOUS or option in _OTHERS
        if not equals and option not in _WITHOUT_VALUE and known and rest:
            value = rest.pop(0).text
        options[option] = value
    return options, rest


def _number(option: str, value: str) -> int | float | str | None:
    if option == "nproc-per-node" and value in {"gpu", "auto"}:
        return "auto"
    try:
        return float(value) if option == "monitor-interval" else int(value)
    except ValueError:
        return None


def _of_another_library(command: str, name: str, first: Word, python: str, words: list[Word]) -> Launched:
    """Return the refusal of a launcher that also configures its library, and the command without it."""
    start = next((word.start for word in words if word.text.endswith(".py")), None)
    program = "train.py" if start is None else command[start:]
    options = shlex.join(word.text for word in words if start is None or word.start < start)
    settings = f" Move its options ({options}) to the script or its configuration." if options else ""
    corrected = f"{command[: first.start]}{python} {program}"
    return Launched(corrected, {}, f"{name!r} also sets up its library for the script.{settings}")
