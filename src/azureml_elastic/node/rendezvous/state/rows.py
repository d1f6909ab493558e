"""The rows of the rendezvous, as one node reads and writes them.

A table that is away is waited for: a node without a table can only wait. What the wait ends is the caller's ``check``.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from azureml_elastic.errors import RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import newer
from azureml_elastic.node.rendezvous.state.row_keys import ALL_PREFIX, LANDMARK_PREFIX, ROUND_KEY, member_key, node_of
from azureml_elastic.node.table import Table

__all__ = ["Roster", "Rows"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_SECONDS = (0.2, 5.0)
"""The first and the longest pause while the table is away."""

_NONCE = "written_by"
"""A field that every write has for itself alone, so that a node knows its own again."""

Roster = Mapping[str, Mapping[str, Any]]
"""The members' rows by node, not yet read: of a thousand, most nodes need to look at one or two."""


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
        self.newest: Round | None = None
        """Read, written or heard of; ``None`` before the first."""
        self.said_left = False
        """Whether this node's row says that it has left, so that no word of another node's hub counts before it."""

    def heard(self, round_: Round) -> None:
        """Take note of a version that another node has told."""
        if newer(round_, self.newest):
            self.newest = round_

    def read_round(self) -> Round:
        """Return the newest round; no row is round 1, open."""
        return self._patiently(self.read_round_now)

    def read_round_now(self) -> Round:
        """Return the newest round.

        Raises:
            TableUnavailable: the table is away.
        """
        row = self._table.get(ROUND_KEY)
        return self._read(row.value if row else None, row.etag if row else None)

    def read_some(self, me: str) -> tuple[Round, Roster]:
        """Return the newest round and the rows of a few other nodes; of all others where there are few.

        Args:
            me: this node.
        """
        round_, roster = self._patiently(self._read_now, LANDMARK_PREFIX)
        if round_.state == "open" and not roster.keys() - {me}:
            return self._patiently(self.read_all_now)
        return round_, roster

    def read_all_now(self) -> tuple[Round, Roster]:
        """Return the newest round and every node's row.

        Raises:
            TableUnavailable: the table is away.
        """
        return self._read_now(ALL_PREFIX)

    def replace_round(self, to: Round) -> bool:
        """Write the round's row unless it has changed since this node read it last; return whether it was written.

        Raises:
            ValueTooLarge: the round has too many members for one row.
        """
        etag = self._write(ROUND_KEY, to.to_value(), self._round_etag)
        if etag is None:
            return False
        self._round_etag = etag
        self.heard(to)
        return True

    def end_round(self, number: int, to: Round) -> bool:
        """Write the round's row if it still says that this round is sealed; return whether it was written."""
        while True:
            current = self.read_round()
            if current.state != "sealed" or current.number != number:
                return False
            if self.replace_round(to):
                return True

    def write_member(self, member: Member, unless: Callable[[], bool] = lambda: False) -> bool:
        """Write this node's row: one call, unless an earlier incarnation left one behind.

        Args:
            member: this node.
            unless: asked while the table is away; true gives the write up, which may have happened all the same.

        Returns:
            Whether it was written.
        """
        try:
            while (etag := self._write(member.key, member.to_value(), self._member_etag, unless)) is None:
                row = self._patiently(self._table.get, member.key, unless=unless)
                self._member_etag = row.etag if row else None
        except TableUnavailable:
            return False
        self._member_etag = etag
        self.said_left = member.state == "left"
        return True

    def read_member(self, node: str) -> Member | None:
        """Return another node's row, ``None`` where there is none.

        Raises:
            TableUnavailable: the table is away.
        """
        row = self._table.get(member_key(node))
        return Member.from_value(row.value) if row is not None else None

    def _read_now(self, prefix: str) -> tuple[Round, Roster]:
        round_row, roster = None, {}
        for row in self._table.query(prefix):
            if row.key == ROUND_KEY:
                round_row = row
            elif (node := node_of(row.key)) is not None:
                roster[node] = row.value
        return self._read(round_row.value if round_row else None, round_row.etag if round_row else None), roster

    def _read(self, value: Mapping[str, Any] | None, etag: str | None) -> Round:
        self._round_etag = etag
        round_ = Round.from_value(value) if value is not None else Round()
        self.heard(round_)
        return round_

    def _write(
        self, key: str, value: Mapping[str, Any], etag: str | None, unless: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Write a row that has this version, or that does not exist where ``etag`` is ``None``.

        A call whose answer was lost is repeated. The first of the two to arrive then stands in the way of the second,
        which must not pass for somebody else's write.

        Returns:
            The new version, ``None`` if the row is not as expected and somebody else has made it so.
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

        return self._patiently(write, unless=unless)

    def _patiently(self, call: Callable[..., _T], *arguments: Any, unless: Callable[[], bool] = lambda: False) -> _T:
        """Call until the table answers.

        Raises:
            TableUnavailable: it has not, and ``unless`` has become true.
        """
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                return call(*arguments)
            except TableUnavailable as error:
                _LOG.warning("The table is away (%s); trying again in %.1f s.", error, pause)
                for _ in range(round(pause / _RETRY_SECONDS[0])):
                    if unless():
                        raise
                    self._pause(_RETRY_SECONDS[0])
                pause = min(longest, pause * 2)
