"""Names by which people know the nodes of a run on Azure ML, instead of those that the nodes give themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from azureml_elastic.ledger.events import Event, NodeStarted

__all__ = ["NodeNames"]


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
