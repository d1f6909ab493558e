"""The number of steps of a run, known before its state is restored, and how many of them are repeated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.plurals import counted
from azureml_elastic.train.session.stack_session import StackSession

__all__ = ["Progress", "RepetitionLog"]

_LOG = logging.getLogger(__name__)

_LOG_SECONDS = 5.0


class Progress:
    """The number of steps, as a tracked object that the state can be compared by before it is restored."""

    def __init__(self, session: StackSession) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps completed."""
        return {"steps": self._session.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the session restores the number."""


class RepetitionLog:
    """Tells the log how many trained steps a script counts once more, and from time to time how many are left.

    Args:
        clock: clock in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = 0
        self._next = 0.0

    def begin(self, steps: int) -> None:
        """Take the number of steps that a script begins with; a later part of them changes nothing."""
        if steps and not self._total:
            self._total, self._next = steps, self._clock() + _LOG_SECONDS
            # As a warning: scripts that do not configure logging show nothing below it.
            verb = "is" if steps == 1 else "are"
            _LOG.warning("The script counts %s that %s trained already.", counted(steps, "step"), verb)

    def go_on(self, left: Callable[[], int]) -> None:
        """Note that a step is repeated.

        Args:
            left: function that returns the number of steps that are left, called once in some seconds
        """
        if not self._total or self._clock() < self._next:
            return
        self._next = self._clock() + _LOG_SECONDS
        text = f"{self._total - left():,} of {self._total:,}"
        _LOG.warning("The script has counted %s steps that are trained already.", text)
