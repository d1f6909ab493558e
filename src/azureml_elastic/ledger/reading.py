"""Readers of the files that nodes and workers append to during a run: ``events/*.jsonl`` and ``samples/*.jsonl``.

Nodes get the names by which people know them on Azure ML, instead of those that they give themselves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from azureml_elastic.ledger.events import Event, NodeStarted, read_event
from azureml_elastic.ledger.line_file import DROPPED
from azureml_elastic.ledger.samples import SampleLine


class LineReader:
    """Reader of a growing file, which need not exist yet; returns each complete line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, *, last: bool = False) -> list[bytes]:
        """Return the lines completed since the last call, without their line feeds.

        Once nobody writes to the file any more (``last``), its last line counts without a line feed, too.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        if last and data and not data.endswith(b"\n"):
            self._offset += len(data)
            return data.split(b"\n")
        # A line without its end is still being written, and read with the next call.
        complete, line_feed, _rest = data.rpartition(b"\n")
        self._offset += len(complete) + len(line_feed)
        return complete.split(b"\n") if line_feed else []


class EventReader:
    """Reader of the event files in a run's folder, which need not exist yet; only those of one node are in order."""

    def __init__(self, folder: Path) -> None:
        self.skipped = 0
        """Number of complete lines that are not events of a known kind, with those that could not be written."""
        self._folder = folder
        self._files: dict[Path, LineReader] = {}

    def read(self) -> list[Event]:
        """Return the events written since the last call."""
        events: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in self._files.setdefault(path, LineReader(path)).read():
                try:
                    events.append(read_event(line))
                except ValueError:
                    self.skipped += _dropped(line) or 1
        return events


def read_events(folder: Path) -> list[Event]:
    """Return all events of a run's ``events`` folder."""
    return EventReader(folder).read()


def read_samples(folder: Path) -> tuple[list[SampleLine], int, int]:
    """Return the lines of a run's ``samples`` folder, and how many are torn and how many could not be written."""
    texts = [text for path in sorted(folder.glob("round-*.jsonl")) for text in path.read_bytes().split(b"\n") if text]
    lines = [line for text in texts if (line := _parse_samples(text)) is not None]
    dropped = [count for text in texts if (count := _dropped(text))]
    return lines, len(texts) - len(lines) - len(dropped), sum(dropped)


def _dropped(text: bytes) -> int:
    """Return how many lines could not be written before this one, as it says; 0 if it is another line."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(text)[DROPPED])
    return 0


def _parse_samples(text: bytes) -> SampleLine | None:
    try:
        value = json.loads(text)
        number, step = int(value["round"]), int(value["step"])
        if value.get("done") is True:
            return SampleLine(number, step, epoch=-1, ids=())
        ids = tuple(int(sample) for sample in value["ids"])
        return SampleLine(
            number,
            step,
            epoch=int(value["epoch"]),
            ids=ids,
            done=False,
            of=value.get("of"),
            loader=str(value.get("loader", "train")),
        )
    except (ValueError, KeyError, TypeError):
        return None


class NodeNames:
    """Names of the nodes by their jobs.

    A node on Azure ML calls itself by its host name and a random number. Its first event names its job, whose display
    name is that of the node, such as ``spot_0``. Further nodes of the same job are ``spot_0.1`` and so on.

    Args:
        label: function that returns the display name of a job; ``None`` keeps the names of its nodes.
    """

    def __init__(self, label: Callable[[str], str | None]) -> None:
        self._label = label
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def apply(self, events: Iterable[Event]) -> list[Event]:
        """Return the events with the names of those nodes that have started, in these events or before."""
        events = list(events)
        for event in events:
            if isinstance(event, NodeStarted) and event.node not in self._names and event.job:
                self._add(event.node, self._label(event.job))
        return [self._renamed(event) for event in events]

    def _add(self, node: str, label: str | None) -> None:
        if label is not None:
            count = self._counts[label] = self._counts.get(label, 0) + 1
            self._names[node] = label if count == 1 else f"{label}.{count - 1}"

    def _renamed(self, event: Event) -> Event:
        changes = {name: self._replaced(value) for name, value in event if isinstance(value, str | tuple)}
        return event.model_copy(update=changes)

    def _replaced(self, value: Any) -> Any:
        """Return a text, or a tuple with texts, in which the names are replaced, also within sentences."""
        if isinstance(value, tuple):
            return tuple(map(self._replaced, value))
        if isinstance(value, str) and value:
            for node, name in self._names.items():
                value = value.replace(node, name)
        return value
