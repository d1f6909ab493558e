"""The rendezvous' rows, as one node reads and writes them. While the table is unavailable, calls are repeated."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from azureml_elastic.errors import RowChanged, RowExists, TableUnavailable, UsageError
from azureml_elastic.ipc import KEY_BYTES
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import LatestRound
from azureml_elastic.node.rendezvous.state.row_keys import (
    ALL_PREFIX,
    LANDMARK_PREFIX,
    ROUND_KEY,
    RUN_KEY,
    member_key,
    node_of,
)
from azureml_elastic.node.table import Row, Table

__all__ = ["Roster", "Rows"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_SECONDS = (0.2, 5.0)
"""First and longest pause while the table is unavailable."""

_KEY_SECONDS = 0.05
"""Time that most nodes of a new run wait for others to make the run's key, so that a thousand do not try at once."""

_NONCE = "written_by"
"""Field with a random value for each write, by which a node recognises its own."""

Roster = Mapping[str, Mapping[str, Any]]
"""Values of the members' rows by node. They are not parsed, since most nodes need one or two of a thousand."""


class Rows:
    """The round's row and this node's own row, with the versions that were read last.

    Args:
        table: table of the run.
        pause: function that sleeps for some seconds while the table is unavailable; an exception from it ends the call.
        latest: receives each version of the round that is read or written.

    Attributes:
        has_left: whether this node's row says that it has left.
        run_key: key with which the nodes authenticate themselves to each other, once it is read.
    """

    def __init__(self, table: Table, pause: Callable[[float], object], latest: LatestRound) -> None:
        self._table = table
        self._pause = pause
        self._latest = latest
        self._round_etag: str | None = None
        self._member_etag: str | None = None
        self.has_left = False
        self.run_key: bytes | None = None

    def read_round(self, *, retry: bool = True) -> Round:
        """Return the current round; without a row it is round 1, open.

        Args:
            retry: whether to wait for a table that is unavailable.

        Raises:
            TableUnavailable: the table is unavailable, and ``retry`` is false.
        """
        row = self._retry(self._table.get, ROUND_KEY) if retry else self._table.get(ROUND_KEY)
        return self._read(row)

    def read_run_key(self, *, defer: bool) -> bytes:
        """Return the run's key, which the first node makes. Reads the table unless a query has read it.

        Args:
            defer: whether to leave the first attempt to make the key to other nodes.

        Raises:
            UsageError: the row holds no key.
        """
        while self.run_key is None:
            row = self._retry(self._table.get, RUN_KEY)
            if row is not None:
                self.run_key = _parse_key(row)
            elif defer:
                defer = False
                self._pause(_KEY_SECONDS)
            else:
                with contextlib.suppress(RowExists):
                    self._retry(self._table.insert, RUN_KEY, {"key": secrets.token_hex(KEY_BYTES)})
        return self.run_key

    def read_some(self, me: str) -> tuple[Round, Roster]:
        """Return the round and some rows of nodes other than ``me``, all of them where there are few."""
        round_, roster = self._retry(self._query, LANDMARK_PREFIX)
        if round_.state == "open" and not roster.keys() - {me}:
            return self._retry(self.read_all)
        return round_, roster

    def read_all(self) -> tuple[Round, Roster]:
        """Return the round and all nodes' rows.

        Raises:
            TableUnavailable: the table is unavailable.
        """
        return self._query(ALL_PREFIX)

    def replace_round(self, to: Round) -> bool:
        """Write the round's row if it has not changed since it was read last; return whether it was written.

        Raises:
            ValueTooLarge: the round has too many members for one row.
        """
        etag = self._write(ROUND_KEY, to.to_value(), self._round_etag)
        if etag is None:
            return False
        self._round_etag = etag
        self._latest.observe(to)
        return True

    def end_round(self, number: int, to: Round) -> bool:
        """Write the round's row if it still holds this sealed round; return whether it was written."""
        while True:
            current = self.read_round()
            if current.state != "sealed" or current.number != number:
                return False
            if self.replace_round(to):
                return True

    def write_member(self, member: Member, unless: Callable[[], bool] = lambda: False) -> bool:
        """Write this node's row, in one call unless an earlier incarnation has left a row.

        Args:
            member: this node.
            unless: condition that is checked while the table is unavailable; true abandons the write, which may still
                have happened.

        Returns:
            Whether it was written.
        """
        try:
            while (etag := self._write(member.key, member.to_value(), self._member_etag, unless)) is None:
                row = self._retry(self._table.get, member.key, unless=unless)
                self._member_etag = row.etag if row else None
        except TableUnavailable:
            return False
        self._member_etag = etag
        self.has_left = member.state == "left"
        return True

    def read_member(self, node: str) -> Member | None:
        """Return another node's row, ``None`` where there is none.

        Raises:
            TableUnavailable: the table is unavailable.
        """
        row = self._table.get(member_key(node))
        return Member.from_value(row.value) if row is not None else None

    def _query(self, prefix: str) -> tuple[Round, Roster]:
        round_row, roster = None, {}
        for row in self._table.query(prefix):
            if row.key == ROUND_KEY:
                round_row = row
            elif row.key == RUN_KEY:
                self.run_key = _parse_key(row)
            elif (node := node_of(row.key)) is not None:
                roster[node] = row.value
        return self._read(round_row), roster

    def _read(self, row: Row | None) -> Round:
        self._round_etag = row.etag if row is not None else None
        round_ = Round.from_value(row.value) if row is not None else Round()
        self._latest.observe(round_)
        return round_

    def _write(
        self, key: str, value: Mapping[str, Any], etag: str | None, unless: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Replace the row of this version, or insert it where ``etag`` is ``None``.

        A call whose answer was lost is repeated. If the first one was carried out, the second one finds the row
        changed; the nonce shows that it was this node's own write.

        Returns:
            The new version, ``None`` if another node has written the row.
        """
        stamped = {**value, _NONCE: secrets.token_hex(8)}
        lost_answers = 0

        def write() -> str | None:
            nonlocal lost_answers
            try:
                return self._table.insert(key, stamped) if etag is None else self._table.replace(key, stamped, etag)
            except (RowExists, RowChanged):
                row = self._table.get(key) if lost_answers else None
                return row.etag if row is not None and row.value.get(_NONCE) == stamped[_NONCE] else None
            except TableUnavailable:
                lost_answers += 1
                raise

        return self._retry(write, unless=unless)

    def _retry(self, call: Callable[..., _T], *arguments: Any, unless: Callable[[], bool] = lambda: False) -> _T:
        """Repeat the call until the table answers.

        Raises:
            TableUnavailable: the table is unavailable, and ``unless`` returned true.
        """
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                return call(*arguments)
            except TableUnavailable as error:
                _LOG.warning("The table is unavailable (%s); trying again in %.1f s.", error, pause)
                for _ in range(round(pause / _RETRY_SECONDS[0])):
                    if unless():
                        raise
                    self._pause(_RETRY_SECONDS[0])
                pause = min(longest, pause * 2)


def _parse_key(row: Row) -> bytes:
    try:
        key = bytes.fromhex(row.value["key"])
    except (KeyError, TypeError, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"The run's table holds no valid key in the row {RUN_KEY!r}. Start the run with a new name.")
    return key
