"""The table in one SQLite file, for nodes on one machine.

Any number of processes and threads may open the file. A process killed during a write leaves nothing behind, because
each write is one transaction of SQLite's write-ahead log. The log requires shared memory, so the file must be on a
local disk, not on a network mount.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from azureml_elastic.errors import RowChanged, RowExists, TableError, TableForbidden, TableNotFound, TableUnavailable
from azureml_elastic.node.table.keys import key_range, read_key, write_key
from azureml_elastic.node.table.protocol import Row
from azureml_elastic.node.table.values import read_value, write_value
from azureml_elastic.private_folder import make_private

_BUSY_TIMEOUT_S = 10.0

# ``clock`` has one row. Its version counts the writes of the file, so that etags are unique, and its time never goes
# back, even if the machine's clock does.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    name TEXT NOT NULL, partition TEXT NOT NULL, key TEXT NOT NULL,
    value TEXT NOT NULL, version INTEGER NOT NULL, time_us INTEGER NOT NULL,
    PRIMARY KEY (name, partition, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clock (
    id INTEGER PRIMARY KEY CHECK (id = 0), version INTEGER NOT NULL, time_us INTEGER NOT NULL
);
INSERT OR IGNORE INTO clock VALUES (0, 0, 0);
"""

_Record = tuple[str, str, int, int]  # key, value, version, time_us


class SqliteTable:
    """Rows of one run in an SQLite file; implements ``Table``.

    Args:
        path: path of the file; created with its folder if missing.
        table: name of the table; one file holds any number of tables.
        partition: run id.

    Raises:
        TableNotFound: the file cannot be created or is not an SQLite database.
        TableForbidden: the file is not writable.
        TableUnavailable: the file stayed locked by other processes.
        KeyInvalid: the partition is empty or too long.
    """

    def __init__(self, path: Path | str, table: str, partition: str) -> None:
        self._path = Path(path).absolute()
        self._scope = (table, write_key(partition))
        self._lock = threading.Lock()  # one connection, used by one thread at a time
        self._connection = self._open()

    def get(self, key: str) -> Row | None:
        """Return the row, or ``None`` if it does not exist."""
        written = write_key(key)
        with self._locked():
            record = self._find(written)
        return None if record is None else _row(record)

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        """Insert a new row and return its etag."""
        written, text = write_key(key), write_value(key, value)
        with self._transaction():
            if self._find(written) is not None:
                raise RowExists(f"Row {key!r} exists already; nothing was written. Read it, or replace it by its etag.")
            return self._write(written, text)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """Replace the row if its version is ``etag``, and return the new etag."""
        written, text = write_key(key), write_value(key, value)
        with self._transaction():
            self._match(key, written, etag)
            return self._write(written, text)

    def delete(self, key: str, etag: str | None = None) -> None:
        """Delete the row. A missing row is an error only if an etag is given."""
        written = write_key(key)
        with self._transaction():
            if etag is not None:
                self._match(key, written, etag)
            self._connection.execute(
                "DELETE FROM rows WHERE name = ? AND partition = ? AND key = ?", (*self._scope, written)
            )

    def query(self, prefix: str) -> Iterator[Row]:
        """Yield all rows whose key starts with ``prefix``, as of one point in time."""
        with self._locked():
            records: list[_Record] = self._connection.execute(
                "SELECT key, value, version, time_us FROM rows "
                "WHERE name = ? AND partition = ? AND key >= ? AND key < ?",
                (*self._scope, *key_range(prefix)),
            ).fetchall()
        return map(_row, records)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def _find(self, written: str) -> _Record | None:
        record: _Record | None = self._connection.execute(
            "SELECT key, value, version, time_us FROM rows WHERE name = ? AND partition = ? AND key = ?",
            (*self._scope, written),
        ).fetchone()
        return record

    def _match(self, key: str, written: str, etag: str) -> None:
        record = self._find(written)
        if record is None:
            raise RowChanged(f"Row {key!r} is gone; version {etag} was expected. Nothing was written; read it again.")
        if (found := str(record[2])) != etag:
            raise RowChanged(
                f"Row {key!r} has version {found}; version {etag} was expected. Nothing was written; read it again."
            )

    def _write(self, written: str, text: str) -> str:
        self._connection.execute(
            "UPDATE clock SET version = version + 1, time_us = max(time_us + 1, ?)", (time.time_ns() // 1000,)
        )
        version, time_us = self._connection.execute("SELECT version, time_us FROM clock").fetchone()
        self._connection.execute(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)", (*self._scope, written, text, version, time_us)
        )
        return str(version)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the connection; translate errors of SQLite."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise self._translate(error) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Lock the connection and the file; commit at the end, roll back on an error."""
        with self._locked():
            # Takes the write lock at once: SQLite lets no transaction that has read wait for it, but fails if another
            # has written.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _open(self) -> sqlite3.Connection:
        try:
            make_private(self._path.parent)
            # The log and its shared memory get the mode of the file. One that is there must not be opened: to close it
            # would drop the locks that SQLite has on it for other connections of this process.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise self._not_a_table(error) from error
        try:
            _retry_while_locked(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone())
            connection.execute("PRAGMA synchronous = FULL")  # a write that has returned survives a loss of power
            _retry_while_locked(lambda: connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;"))
        except sqlite3.Error as error:
            connection.close()
            translated = self._translate(error)
            raise (
                translated if isinstance(translated, TableForbidden) or _busy(error) else self._not_a_table(error)
            ) from error
        return connection

    def _not_a_table(self, error: Exception) -> TableNotFound:
        return TableNotFound(
            f"The table's file {str(self._path)!r} cannot be opened: {error}. Give the path of an SQLite file, or of "
            "one to be made, on a local disk."
        )

    def _translate(self, error: sqlite3.Error) -> TableError | TableForbidden:
        if "readonly" in str(error):
            return TableForbidden(
                f"The table's file {str(self._path)!r} cannot be written: {error}. Give this process "
                "write access to the file and its folder."
            )
        reason = f"other processes kept it locked for {_BUSY_TIMEOUT_S:g} s" if _busy(error) else "the call failed"
        return TableUnavailable(f"The table's file {str(self._path)!r} is not available, {reason}: {error}.")


def _row(record: _Record) -> Row:
    written, text, version, time_us = record
    key = read_key(written)
    seconds, microseconds = divmod(time_us, 1_000_000)
    timestamp = datetime.fromtimestamp(seconds, timezone.utc).replace(microsecond=microseconds)
    return Row(key, read_value(key, text), str(version), timestamp)


def _busy(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _retry_while_locked(step: Callable[[], object]) -> None:
    """Retry a step of opening while other processes lock the file.

    SQLite fails at once, whatever its busy timeout, if waiting for one lock while holding another could deadlock two
    processes, as when both switch a new file to the write-ahead log.
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            step()
        except sqlite3.Error as error:
            if not _busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.001, 0.02))
        else:
            return
