"""What the nodes of a round agree on, in the store of rank 0's agent, and the key that only they have."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from azureml_elastic.config import environment as variables

__all__ = ["RoundStore"]

_PREFIX = "engine/"
_TIMEOUT = timedelta(seconds=10)


class RoundStore:
    """The store of one round. It ends with the round: then every method raises ``RuntimeError``.

    Args:
        host: address of rank 0's agent.
        port: port of the store.
        key: key that only the run's nodes have, for the engine's own connections.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.key = key
        self._store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)

    @classmethod
    def of_environment(cls) -> Self:
        """Connect to the store of the round that this process has been assigned to.

        The key is removed from the environment, so that no child process inherits it.

        Raises:
            RuntimeError: it cannot be reached.
        """
        key = bytes.fromhex(os.environ.pop(variables.ENGINE_KEY, ""))
        return cls(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), key)

    def set(self, name: str, value: bytes) -> None:
        """Store a value."""
        self._store.set(_PREFIX + name, value)  # type: ignore[arg-type]  # bytes are taken as they are

    def get(self, name: str) -> bytes | None:
        """Return a value, ``None`` while there is none."""
        name = _PREFIX + name
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, which begins with 0, and return it."""
        return int(self._store.add(_PREFIX + name, amount))
