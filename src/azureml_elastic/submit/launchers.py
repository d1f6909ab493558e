"""Commands that start a launcher: read as what the agent does in its place, or refused with the command to write.

``torchrun --nproc_per_node 4 train.py`` says two things: the program, and how many workers a node has. The agent takes
the launcher's place, so the first becomes the command and the second a field of the distribution. What only a
launcher could do is refused by name.
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
_MEETING = frozenset(
    {
        *("nnodes", "node-rank", "master-addr", "master-port", "local-addr"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    }
)
"""Options that say how nodes find each other: the table does that."""

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
    """What a command with a launcher means without it.

    Args:
        command: the same command, with the program in the launcher's place.
        fields: fields of ``ElasticDistribution`` that the launcher's options said.
        refused: why the command cannot be taken over as it is; empty where it can.
    """

    command: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


def read_launcher(command: str) -> Launched | None:
    """Return what a command means whose program is started by a launcher; ``None`` where there is no launcher.

    Args:
        command: shell text, of which nothing but the launcher is changed.

    Raises:
        CommandError: the text cannot be read.
    """
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
    """Check that no launcher stands where the agent will.

    Args:
        command: shell text.

    Raises:
        CommandError: one does; the message has the command to write instead.
    """
    launched = read_launcher(command)
    if launched is None:
        return
    counts = "".join(f" and {name}={value!r} to ElasticDistribution" for name, value in launched.fields.items())
    said = f" {launched.refused}" if launched.refused else ""
    raise CommandError(
        f"The command {command!r} starts a launcher; the elastic agent takes the launcher's place and starts the "
        f"workers itself.{said} Give command={launched.command!r}{counts}."
    )


def _launcher_at(command: str, words: Sequence[Word], position: int) -> tuple[str, str, list[Word]] | None:
    """Return the launcher's name, what starts Python without it, and the words after it."""
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
        elif option not in _MEETING and option not in _DROPPED:
            refused.append(f"--{option} of {name} means nothing to the agent.")
    if name == "torch.distributed.launch" and "use-env" not in options:
        refused.append("The script gets no --local-rank: let it read os.environ['LOCAL_RANK'].")
    return Launched(corrected, fields, " ".join(refused))


def _options(words: list[Word]) -> tuple[dict[str, str], list[Word]]:
    """Return the options by their long names, and the words from the program on."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0).text
        if word == "--":
            break
        said, equals, value = word.partition("=")
        option = _SHORT.get(said, said.lstrip("-").replace("_", "-"))
        known = option in _FIELDS or option in _MEETING or option in _OTHERS
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
    """Refuse a launcher that tells the script more than where it runs; show the command without it."""
    start = next((word.start for word in words if word.text.endswith(".py")), None)
    program = "train.py" if start is None else command[start:]
    said = shlex.join(word.text for word in words if start is None or word.start < start)
    settings = f" What its options say ({said}) belongs into the script or its configuration." if said else ""
    corrected = f"{command[: first.start]}{python} {program}"
    return Launched(corrected, {}, f"{name!r} also sets up its library for the script.{settings}")
