"""A loader as accelerate itself divides it among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["DividedLoader"]


class DividedLoader:
    """A loader that accelerate prepares once it is needed.

    Args:
        prepare: accelerate's own preparation of the loader
    """

    def __init__(self, prepare: Callable[[], Any]) -> None:
        self._prepare = prepare
        self._prepared: Any = None

    def get(self) -> Any:
        """Return the prepared loader."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared
