"""What the nodes of a round agree on: the head's address, in the store of rank 0's agent."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

__all__ = ["RoundStore"]

_ADDRESS = "engine/address"
_TIMEOUT = timedelta(seconds=10)


class RoundStore:
    """The store of one round. It ends with the round: then every method raises ``RuntimeError``.

    Args:
        host: address of rank 0's agent.
        port: port of the store.
    """

    def __init__(self, host: str, port: int) -> None:
        self._store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)

    @classmethod
    def of_environment(cls) -> Self:
        """Connect to the store of the round that this process has been assigned to.

        Raises:
            RuntimeError: it cannot be reached.
        """
        return cls(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def set_address(self, address: str) -> None:
        """Publish the head's address. For rank 0."""
        self._store.set(_ADDRESS, address)

    def address(self) -> str | None:
        """Return the head's address, ``None`` while there is none."""
        return self._store.get(_ADDRESS).decode() if self._store.check([_ADDRESS]) else None
