"""The table in Azure Tables, or in its emulator Azurite.

The only importer of ``azure.data``. Each write carries a random nonce. When the service did write a row but its answer
was lost, the repetition finds the row in its way; the nonce in the row then tells that it is ours.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from azureml_elastic.errors import MissingExtra, RowChanged, RowExists, TableUnavailable, UsageError
from azureml_elastic.node.table.faults import (
    VENDOR_ERRORS,
    Place,
    cause,
    error_code,
    may_have_arrived,
    row_is_missing,
    translate,
)
from azureml_elastic.node.table.keys import key_range, read_key, write_key
from azureml_elastic.node.table.protocol import Row
from azureml_elastic.node.table.values import cut, read_value, write_value

try:
    from azure.core import MatchConditions
    from azure.core.pipeline.transport import RequestsTransport
    from azure.data.tables import TableClient, TableEntity, UpdateMode
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing
try:
    from tenacity import Retrying, retry_if_exception_type, stop_before_delay, wait_random_exponential
except ImportError as missing:
    raise MissingExtra("tenacity", "node") from missing

if TYPE_CHECKING:
    from azureml_elastic.node.table.credentials import Login

__all__ = ["AzureTable"]

T = TypeVar("T")
Timeouts = dict[str, float]

_BUDGET_S = 10.0  # for one call, all its attempts together
_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 4.0
_DELETION_BUDGET_S = 90.0  # Azure keeps the name of a deleted table for 40 s and more
_CONNECTIONS = 256  # kept open; the pool makes more when as many threads ask at once
_PAGE = 1000

_NONCE = "nonce"
_PIECE = "value"


class AzureTable:
    """Rows of one run in an Azure table, which is made when missing; implements ``Table``.

    Args:
        endpoint: the account's table URL; ``None`` takes that of the login's connection string.
        table: the table's name.
        partition: the run.
        login: the identity.

    Raises:
        TableNotFound: the account cannot be reached.
        TableForbidden: the identity lacks a role.
        TableUnavailable: the account answers, but not in time.
        UsageError: the connection string is malformed or is one for another account.
        KeyInvalid: the partition is empty or too long.
    """

    def __init__(self, endpoint: str | None, table: str, partition: str, login: Login) -> None:
        self._partition = write_key(partition)
        self._client = _client(endpoint, table, login)
        self._place = Place(self._client.url.partition("?")[0], table, login.who)
        try:
            self._ensure_table()
        except BaseException:
            self._client.close()
            raise

    def get(self, key: str) -> Row | None:
        """Return the row, or ``None`` where there is none."""
        entity = self._find(key, write_key(key))
        return None if entity is None else _row(entity)

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        """Write a row that does not exist yet and return its etag."""
        entity = self._entity(key, value)
        return self._write(key, entity, lambda **timeouts: self._client.create_entity(entity, **timeouts))

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """Overwrite the row if it still has this version, and return the new etag."""
        entity = self._entity(key, value)
        return self._write(
            key,
            entity,
            lambda **timeouts: self._client.update_entity(
                entity, UpdateMode.REPLACE, etag=etag, match_condition=MatchConditions.IfNotModified, **timeouts
            ),
        )

    def delete(self, key: str, etag: str | None = None) -> None:
        """Remove the row; a row that is not there is no error unless an etag was given."""
        where = (self._partition, write_key(key))
        if etag is None:
            self._call(key, lambda **timeouts: self._client.delete_entity(*where, **timeouts))
            return
        unsure = False

        def attempt(**timeouts: float) -> str | None:
            nonlocal unsure
            status: list[int] = []  # the SDK takes a row that is gone for one deleted
            try:
                self._client.delete_entity(
                    *where,
                    etag=etag,
                    match_condition=MatchConditions.IfNotModified,
                    raw_response_hook=lambda response: status.append(response.http_response.status_code),
                    **timeouts,
                )
            except VENDOR_ERRORS as error:
                ours = translate(error, self._place, key)
                if isinstance(ours, RowChanged):
                    return str(ours)
                unsure = unsure or may_have_arrived(error)
                raise
            return "It is gone." if 404 in status else None

        conflict = self._call(key, attempt)
        if conflict is not None and unsure:
            raise self._unsure(key)
        if conflict is not None:
            raise RowChanged(f"Row {key!r} could not be deleted at version {etag}: {conflict}")

    def query(self, prefix: str) -> Iterator[Row]:
        """Yield all rows whose key starts with ``prefix``, page by page."""
        low, high = key_range(prefix)
        parameters = {"partition": self._partition, "low": low, "high": high}
        token: Any = None

        def page(**timeouts: float) -> tuple[list[TableEntity], Any]:
            pages = self._client.query_entities(
                "PartitionKey eq @partition and RowKey ge @low and RowKey lt @high",
                parameters=parameters,
                results_per_page=_PAGE,
                **timeouts,
            ).by_page(continuation_token=token)
            entities = list(next(pages, ()))
            return entities, pages.continuation_token  # type: ignore[attr-defined]  # the SDK types an Iterator

        while True:
            entities, token = self._call(None, page)
            yield from map(_row, entities)
            if not token:
                return

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _entity(self, key: str, value: Mapping[str, Any]) -> dict[str, str]:
        pieces = {f"{_PIECE}{index:02d}": piece for index, piece in enumerate(cut(write_value(key, value)))}
        nonce = {_NONCE: secrets.token_hex(8)}
        return {"PartitionKey": self._partition, "RowKey": write_key(key), **nonce, **pieces}

    def _find(self, key: str | None, written: str, *, opening: bool = False) -> TableEntity | None:
        def attempt(**timeouts: float) -> TableEntity | None:
            try:
                return self._client.get_entity(self._partition, written, **timeouts)
            except VENDOR_ERRORS as error:
                if row_is_missing(error):
                    return None
                raise

        return self._call(key, attempt, opening=opening)

    def _write(self, key: str, entity: Mapping[str, str], send: Callable[..., Mapping[str, Any]]) -> str:
        unsure = False

        def attempt(**timeouts: float) -> str | RowExists | RowChanged:
            nonlocal unsure
            try:
                return str(send(**timeouts)["etag"])
            except VENDOR_ERRORS as error:
                ours = translate(error, self._place, key)
                if isinstance(ours, (RowExists, RowChanged)):
                    ours.__cause__ = cause(error)
                    return ours
                unsure = unsure or may_have_arrived(error)
                raise

        answer = self._call(key, attempt)
        if isinstance(answer, str):
            return answer
        # Something below us, or one of our own attempts, may have written the row and lost the answer.
        found = self._find(key, entity["RowKey"])
        if found is not None and found.get(_NONCE) == entity[_NONCE]:
            return str(found.metadata["etag"])
        if unsure:
            raise self._unsure(key) from answer
        raise answer

    def _unsure(self, key: str) -> TableUnavailable:
        return TableUnavailable(
            f"Table {self._place.table!r} of {self._place.account}, row {key!r}: the answer to the first attempt was "
            "lost, and by now somebody else has changed the row. The call may or may not have been carried out before; "
            "read the row again."
        )

    def _ensure_table(self) -> None:
        # Reading first also serves identities that may use the table but not make one, and costs the service less
        # than 128 nodes that all try to make it. No key is written as "=", so there is no such row.
        try:
            if self._find(None, "=", opening=True) is None:
                return
        except VENDOR_ERRORS:  # pragma: no cover - mapped by _find
            raise
