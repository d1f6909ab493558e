"""Which optimizers step in a step of the script's loop."""

from __future__ import annotations

_REMEMBERED = 64
"""Steps after which an optimizer that has not stepped in them is no longer expected to."""


class StepUpdates:
    """The optimizers that have stepped in the current step, and those that usually do."""

    def __init__(self) -> None:
        self._now: set[int] = set()
        self._absent: dict[int, int] = {}  # steps since each optimizer has stepped last
        self._prepared = 0

    def note(self, optimizer: object, prepared: int) -> None:
        """Note that an optimizer has stepped.

        Args:
            prepared: number of the script's optimizers, all of which are expected in the first step
        """
        self._now.add(id(optimizer))
        self._prepared = prepared

    def expect(self, optimizer: object) -> None:
        """Note that an optimizer has stepped in a step that is trained already."""
        self._absent[id(optimizer)] = 0

    @property
    def missing(self) -> bool:
        """Whether an optimizer has stepped, and another one that usually steps has not."""
        if not self._absent:
            return 0 < len(self._now) < self._prepared
        expected = {optimizer for optimizer, absent in self._absent.items() if absent < _REMEMBERED}
        return bool(self._now and expected - self._now)

    def end_step(self) -> None:
        """Learn from a complete step."""
        for optimizer in self._absent.keys() | self._now:
            self._absent[optimizer] = 0 if optimizer in self._now else self._absent[optimizer] + 1
        self._now.clear()
