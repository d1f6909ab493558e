"""The run's key, with which nodes authenticate themselves to each other, and its row in the table.

The row also says which program the run has. Nodes of another one that got the same run id, as steps of one pipeline
may, are not let in, and do not learn how the run has ended.

The first node makes the key with insert-if-absent. The row decides: a node adopts the key that it finds there, and puts
its own back where the row is gone. So all nodes end up with one key after a table was cleaned, whichever was first.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from azureml_elastic.errors import RowExists, UsageError
from azureml_elastic.ipc import KEY_BYTES, Authenticator
from azureml_elastic.node.rendezvous.state.row_keys import RUN_KEY
from azureml_elastic.node.table import Row, Table

__all__ = ["RunKey"]

_LOG = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
"""Shortest time between two reads because another node has refused this one."""


class RunKey:
    """The key as this node knows it. For the agent's thread.

    Args:
        table: table of the run.
        clock: clock in monotonic seconds.
        authenticator: this node's part in the handshakes with other nodes, which gets each key.
        program: digest of the program of this node's job; ``None`` if it is unknown.

    Attributes:
        value: the key, ``None`` before it is read.
    """

    def __init__(
        self,
        table: Table,
        clock: Callable[[], float],
        authenticator: Authenticator,
        program: str | None = None,
    ) -> None:
        self._table = table
        self._clock = clock
        self._authenticator = authenticator
        self._program = program
        self._refresh_at = 0.0
        self.value: bytes | None = None

    def read(self, *, make: bool) -> bool:
        """Read the row; make the key where there is none and ``make`` is set. Return whether the key is known.

        Raises:
            UsageError: the row holds no key, or that of another program.
            TableUnavailable: the table is unavailable.
        """
        if self.value is None:
            row = self._table.get(RUN_KEY)
            if row is not None:
                self.observe(row)
            elif make:
                self._insert(secrets.token_bytes(KEY_BYTES))
        return self.value is not None

    def observe(self, row: Row | None) -> None:
        """Adopt the key of the row as it was read; put this node's key back where the row is gone.

        Raises:
            UsageError: the row holds no key, or that of another program.
            TableUnavailable: the table is unavailable.
        """
        if row is not None:
            self._adopt_row(row)
        elif self.value is not None:
            _LOG.warning("The run's key is gone from the table; this node puts it back.")
            self._insert(self.value)

    def check(self) -> None:
        """Read the row again, and adopt or restore the key; for the exceptions see :meth:`observe`."""
        self.observe(self._table.get(RUN_KEY))

    def refresh(self) -> bool:
        """Read the row again after a refused handshake, at most once a second; return whether the key has changed.

        For the exceptions see :meth:`observe`.
        """
        now, before = self._clock(), self.value
        if now < self._refresh_at:
            return False
        self._refresh_at = now + _REFRESH_SECONDS
        self.check()
        return self.value != before

    def _insert(self, key: bytes) -> None:
        try:
            self._table.insert(RUN_KEY, {"key": key.hex(), **({"program": self._program} if self._program else {})})
        except RowExists:
            row = self._table.get(RUN_KEY)
            if row is not None:
                self._adopt_row(row)
        else:
            self._adopt(key)

    def _adopt_row(self, row: Row) -> None:
        key, program = _parse_key(row), row.value.get("program")
        if self._program and program and program != self._program:
            raise UsageError(
                "The run id belongs to another program: another job or step has begun the run with this id, so this "
                "node has trained nothing. Elastic steps of one pipeline whose nodes are separate steps need different "
                "names: environment_variables={'AZUREML_ELASTIC_STEP': 'evaluate'}. Another job needs another name."
            )
        self._adopt(key)

    def _adopt(self, key: bytes) -> None:
        if self.value not in (None, key):
            _LOG.warning("The table holds another key of the run, as after it was cleaned; this node uses that one.")
        self.value = self._authenticator.key = key


def _parse_key(row: Row) -> bytes:
    try:
        key = bytes.fromhex(row.value["key"])
    except (KeyError, TypeError, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"The run's table holds no valid key in the row {RUN_KEY!r}. Start the run with a new name.")
    return key
