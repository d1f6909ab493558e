"""The rendezvous' rows, as one node reads and writes them. While the table is unavailable, calls are repeated.

**The run's key, with which nodes authenticate themselves to each other, and its row in the table.** The row also says
which program the run has. Nodes of another one that got the same run id, as steps of one pipeline may, are not let in,
and do not learn how the run has ended.

The first node makes the key with insert-if-absent. The row decides: a node adopts the key that it finds there, and puts
its own back where the row is gone. So all nodes end up with one key after a table was cleaned, whichever was first.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from azureml_elastic.errors import (
    ElasticError,
    RowChanged,
    RowExists,
    TableUnavailable,
    UsageError,
    ValueTooLarge,
)
from azureml_elastic.ipc import KEY_BYTES, Authenticator
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Roster
from azureml_elastic.node.core.round import (
    Member,
    NewestRound,
    Round,
    describe_loss,
    has_gone_back,
    require_member,
    restored,
)
from azureml_elastic.node.rendezvous.row_keys import (
    ALL_PREFIX,
    LANDMARK_PREFIX,
    ROUND_KEY,
    RUN_KEY,
    member_key,
    node_of,
    parsed,
)
from azureml_elastic.node.table import Row, Table

_REFRESH_SECONDS = 1.0
"""Shortest time between two reads because another node has refused this one."""


class RunKey:
    """The key as this node knows it. For the agent's thread.

    Args:
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
        except RowExists:  # another node was first: its key counts
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


_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_SECONDS = (0.2, 5.0)
"""First and longest pause while the table is unavailable."""

_KEY_SECONDS = 0.05
"""Time that most nodes of a new run wait for others to make the run's key, so that a thousand do not try at once."""

_NONCE = "written_by"
"""Field with a random value for each write, by which a node recognises its own."""


@dataclass(frozen=True)
class RowLook:
    """The rows of the round and of the run's key as they were at a moment."""

    round: Row | None
    key: Row | None


class Rows:
    """The round's row and this node's own row, with the versions that were read last.

    Args:
        pause: function that sleeps for some seconds while the table is unavailable; an exception from it ends the call.
        latest: receives each version of the round that is read or written.

    Attributes:
        has_left: whether this node's row says that it has left.
        persistent: whether a table that is gone, refuses this node or holds what no node has written counts as
            unavailable, for a node that has been in a round: its state must not be lost for that.
    """

    def __init__(self, table: Table, pause: Callable[[float], object], latest: NewestRound, key: RunKey) -> None:
        self._table = table
        self._pause = pause
        self._latest = latest
        self._round_etag: str | None = None
        self._round_seen: Round | None = None  # the version with this etag
        self._etag_written: str | None = None  # of the version that this node has written last
        self._member_etag: str | None = None
        self.has_left = False
        self.persistent = False
        self.key = key

    def perform(self, call: do.TableCall) -> ev.JoinEvent | None:
        """Perform a call of a node that joins; return its answer, ``None`` where it was abandoned."""
        match call:
            case do.ReadRound():
                return ev.RoundRead(self.read_round())
            case do.ReadRows():
                try:
                    return ev.RowsRead(*self.read_all())
                except TableUnavailable as error:
                    _LOG.warning("The table is unavailable (%s); reading again later.", error)
                    return ev.RowsUnavailable()
            case do.Restore():
                return ev.RoundRead(self.restore(call.row, call.known))
            case do.WriteRow():
                is_written = self.write_member(call.me, lambda: self._latest.after(call.round) is not None)
                return ev.RowWritten() if is_written else None
            case do.WriteRound():
                try:
                    return ev.RoundWritten(self.replace_round(call.to))
                except ValueTooLarge as error:
                    _LOG.error("Round %d cannot be sealed: %s", call.to.number, error)
                    return ev.RoundTooLarge(str(error))
            case do.EndRound():
                return ev.RoundWritten(self.end_round(call.round.number, call.to))
            case do.ReadKey():
                try:
                    return ev.KeyRead(self.refresh_key())
                except TableUnavailable as error:
                    _LOG.warning("The table is unavailable (%s); reading the run's key again later.", error)
                    return ev.KeyRead(changed=False)

    def read_round(self) -> Round:
        """Return the current round; without a row it is round 1, open. An older one than was known is restored."""
        known = self._latest.newest
        return self.restore(self._retry(self._get_round), known)

    def look(self) -> RowLook:
        """Read the rows of the round and of the run's key, for :meth:`observe`. Thread-safe.

        Raises:
            TableUnavailable: the table is unavailable.
        """
        # Nothing is kept here: the versions that were read last belong to the agent's thread.
        key = self._call(self._table.get, RUN_KEY)
        return RowLook(self._call(self._table.get, ROUND_KEY), key)

    def observe(self, look: RowLook) -> Round:
        """Return the round that the row has held, older or not, and adopt or restore the run's key.

        Raises:
            UsageError: the table holds the key of another program's run.
            TableUnavailable: the table is unavailable, or the row holds what no node has written.
        """
        self._call(self.key.observe, look.key)
        return self._call(self._read, look.round)

    def restore(self, row: Round, known: Round | None) -> Round:
        """Write the round's row again where it went back in time or is gone, and return the current round.

        Args:
            known: newest version that this node knew before.
        """
        while known is not None and has_gone_back(row, known):
            self._report_loss(row, known)
            to = restored(row, known)
            if self.replace_round(to):
                return to
            # Another node was faster, perhaps with an older version still: until the row is as new as what was known.
            row = self._retry(self._get_round)
        return row

    def read_run_key(self, *, defer: bool) -> None:
        """Read the run's key, which the first node makes. Reads the table unless a query has read it.

        Args:
            defer: whether to leave the first attempt to make the key to other nodes.

        Raises:
            UsageError: the row holds no key.
        """
        while not self._retry(partial(self.key.read, make=not defer)):
            defer = False
            self._pause(_KEY_SECONDS)

    def refresh_key(self) -> bool:
        """Read the run's key again because a node has refused this one; see :meth:`RunKey.refresh`.

        Raises:
            TableUnavailable: the table is unavailable.
        """
        return self._call(self.key.refresh)

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
        self._round_etag = self._etag_written = etag
        self._round_seen = to
        self._latest.observe(to)
        return True

    def has_written(self, round_: Round) -> bool:
        """Return whether the row holds this version, by what was read last, and this node has written it.

        No later round has run then. A compare-and-swap with this version shows whether that is still so.
        """
        return self._round_etag is not None and self._round_etag == self._etag_written and self._round_seen == round_

    def end_round(self, number: int, to: Round) -> bool:
        """Write the round's row if it still holds this sealed round, or lost it; return whether it was written."""
        seen = self._round_seen
        # Who has sealed the round knows the version of its row: a compare-and-swap shows whether it still has it.
        if seen is not None and (seen.number, seen.state) == (number, "sealed") and self.replace_round(to):
            return True
        while True:
            known = self._latest.newest
            current = self._retry(self._get_round)
            if (current.number, current.state) != (number, "sealed"):
                if known is None or (known.number, known.state) != (number, "sealed"):
                    return False
                if not has_gone_back(current, known):
                    return False
                self._report_loss(current, known)
            if self.replace_round(to):
                return True

    def write_member(self, member: Member, unless: Callable[[], bool] = lambda: False) -> bool:
        """Write this node's row, in one call unless an earlier incarnation has left a row.

        Args:
            unless: condition that is checked while the table is unavailable; true abandons the write, which may still
                have happened.

        Returns:
            Whether it was written.
        """
        try:
            while (etag := self._write(member_key(member.node), member.to_value(), self._member_etag, unless)) is None:
                row = self._retry(self._table.get, member_key(member.node), unless=unless)
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

        def read() -> Member | None:
            row = self._table.get(member_key(node))
            return None if row is None else parsed(Member.from_value, row)

        return self._call(read)

    def _query(self, prefix: str) -> tuple[Round, Roster]:
        def read() -> tuple[Row | None, Row | None, Roster]:
            round_row, key_row, roster = None, None, {}
            for row in self._table.query(prefix):
                if row.key == ROUND_KEY:
                    round_row = row
                elif row.key == RUN_KEY:
                    key_row = row
                elif (node := node_of(row.key)) is not None:
                    parsed(require_member, row)
                    roster[node] = row.value
            return round_row, key_row, roster

        round_row, key_row, roster = self._call(read)
        self._call(self.key.observe, key_row)
        return self._call(self._read, round_row), roster

    def _get_round(self) -> Round:
        return self._read(self._table.get(ROUND_KEY))

    def _read(self, row: Row | None) -> Round:
        round_ = parsed(Round.from_value, row) if row is not None else Round()
        self._round_etag = row.etag if row is not None else None
        self._round_seen = round_
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
                return self._call(call, *arguments)
            except TableUnavailable as error:
                _LOG.warning("The table is unavailable (%s); trying again in %.1f s.", error, pause)
                # In short pieces: a notice, or a newer round, must not wait for the table.
                for _ in range(round(pause / _RETRY_SECONDS[0])):
                    if unless():
                        raise
                    self._pause(_RETRY_SECONDS[0])
                pause = min(longest, pause * 2)

    def _call(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call the table once; see :attr:`persistent`.

        Raises:
            TableUnavailable: the table is unavailable.
        """
        try:
            return call(*arguments)
        except (RowExists, RowChanged, ValueTooLarge, TableUnavailable):
            raise
        except ElasticError as error:
            if not self.persistent:
                raise
            raise TableUnavailable(f"{error} This node keeps its state and waits") from error

    def _report_loss(self, row: Round, known: Round) -> None:
        _LOG.warning(
            "A failover has lost writes, or the table was cleaned or made again: %s. Writing it again; the nodes form "
            "the next round.",
            describe_loss(row, known),
        )
        self._retry(self.key.check)
