"""The number of steps of a run, known before its state is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from azureml_elastic.train.integrations.stack_session import StackSession

__all__ = ["Progress"]


class Progress:
    """The number of steps, as a tracked object that the state can be compared by before it is restored."""

    def __init__(self, session: StackSession) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps completed."""
        return {"steps": self._session.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the session restores the number."""
