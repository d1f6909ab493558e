"""What a loop of a script's own asks of the training stack that the script uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn


class Stack(Protocol):
    """A training stack whose script has the loop."""

    unstepped: str = "The optimizer has not stepped at the end of a global batch."
    """Warning for a loop that does not step where the stack expects it."""

    def objects(self) -> Mapping[str, Any]:
        """Return the objects to track."""

    def models(self) -> list[nn.Module]:
        """Return the models as the script calls them."""

    def own_schedulers(self) -> list[Any]:
        """Return the schedulers that the script steps by itself."""

    def plain_batches(self) -> Iterator[Any]:
        """Yield the batches of a pass that trains nothing, as the stack divides them among the ranks."""

    def mark(self, *, last: bool) -> None:
        """Have the stack take the next micro-batch for the last one of a step, or not."""

    @property
    def evaluates(self) -> bool:
        """Whether the script iterates over other data than those that it trains."""
        return False

    def restored(self) -> None:
        """Do what belongs to the beginning, once the state of the run is restored."""
        return
