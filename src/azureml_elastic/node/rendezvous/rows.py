"""The rows of the rendezvous, as one node reads and writes them.

A table that is away is waited for: a node without a table can only wait. What the wait ends is the caller's ``check``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from azureml_elastic.errors import RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.rendezvous.round import MEMBER_PREFIX, ROUND_KEY, Member, Round
from azureml_elastic.node.table import Table

__all__ = ["Rows"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_SECONDS = (0.2, 5.0)
"""The first and the longest pause while the table is away."""


class Rows:
    """The newest version of the round's row that this node has seen, and of its own row.

    Args:
        table: opened for the run.
        pause: sleeps for some seconds while the table is away; may raise to end the wait.
    """

    def __init__(self, table: Table, pause: Callable[[float], object]) -> None:
        self._table = table
        self._pause = pause
        self._round_etag: str | None = None
        self._member_etag: str | None = None

    def read_round(self) -> Round:
        """Return the newest round; no row is round 1, open."""
        return self._patiently(self.read_round_now)

    def read_round_now(self) -> Round:
        """Return the newest round.

        Raises:
            TableUnavailable: the table is away.
        """
        row = self._table.get(ROUND_KEY)
        self._round_etag = row.etag if row else None
        return Round.from_value(row.value) if row else Round()

    def replace_round(self, to: Round) -> bool:
        """Write the round's row unless it has changed since this node read it last; return whether it was written."""
        try:
            if self._round_etag is None:
                self._round_etag = self._patiently(self._table.insert, ROUND_KEY, to.to_value())
            else:
                self._round_etag = self._patiently(self._table.replace, ROUND_KEY, to.to_value(), self._round_etag)
        except (RowExists, RowChanged):
            return False
        return True

    def end_round(self, number: int, to: Round) -> bool:
        """Write the round's row if it still says that this round is sealed; return whether it was written."""
        while True:
            current = self.read_round()
            if current.state != "sealed" or current.number != number:
                return False
            if self.replace_round(to):
                return True

    def members(self) -> list[Member]:
        """Return every node's row."""
        return self._patiently(self._query_members)

    def write_member(self, member: Member) -> None:
        """Write this node's row: one call, unless an earlier incarnation left one behind."""
        while True:
            try:
                if self._member_etag is None:
                    self._member_etag = self._patiently(self._table.insert, member.key, member.to_value())
                else:
                    value, etag = member.to_value(), self._member_etag
                    self._member_etag = self._patiently(self._table.replace, member.key, value, etag)
            except (RowExists, RowChanged):
                row = self._patiently(self._table.get, member.key)
                self._member_etag = row.etag if row else None
            else:
                return

    def _query_members(self) -> list[Member]:
        return [Member.from_value(row.value) for row in self._table.query(MEMBER_PREFIX)]

    def _patiently(self, call: Callable[..., _T], *arguments: Any) -> _T:
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                return call(*arguments)
            except TableUnavailable as error:
                _LOG.warning("The table is away (%s); trying again in %.1f s.", error, pause)
                self._pause(pause)
                pause = min(longest, pause * 2)
