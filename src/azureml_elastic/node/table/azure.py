"""The table in Azure Tables, or in its emulator Azurite.

The only importer of ``azure.data``. Each write carries a random nonce. When the service did write a row but its answer
was lost, the repetition finds the row in its way; the nonce in the row then tells that it is ours. A write that failed
as ``TableUnavailable`` keeps its nonce: the same call, made again, goes on with the same write.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from azureml_elastic.errors import MissingExtra, RowChanged, RowExists, TableUnavailable, UsageError
from azureml_elastic.node.azure.retry import CALL_TIMEOUT, retry
from azureml_elastic.node.table.azure_errors import (
    VENDOR_ERRORS,
    TableContext,
    cause,
    error_code,
    may_have_arrived,
    retry_after,
    row_is_missing,
    translate,
)
from azureml_elastic.node.table.azure_transport import Transport
from azureml_elastic.node.table.keys import key_range, read_key, write_key
from azureml_elastic.node.table.protocol import Row
from azureml_elastic.node.table.values import cut, read_value, write_value

try:
    from azure.core import MatchConditions
    from azure.data.tables import TableClient, TableEntity, UpdateMode
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

if TYPE_CHECKING:
    from azureml_elastic.node.azure.credentials import TableCredential

__all__ = ["AzureTable"]

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 4.0
_DELETION_TIMEOUT = timedelta(seconds=90)  # Azure keeps the name of a deleted table for 40 s and more
_CONNECTIONS = 256  # kept open; threads beyond that make one for each call
_PAGE = 1000
_UNSETTLED = 256  # writes whose outcome is unknown; beyond that the oldest are forgotten

_NONCE = "nonce"
_PIECE = "value"


class AzureTable:
    """Rows of one run in an Azure table, which is made when missing; implements ``Table``.

    Args:
        endpoint: the account's table URL; ``None`` takes that of the login's connection string.
        table: the table's name.
        partition: the run.
        login: the identity.
        timeout: for one call, all its attempts together.

    Raises:
        TableNotFound: the account cannot be reached.
        TableForbidden: the identity lacks a role.
        TableUnavailable: the account answers, but not in time.
        UsageError: the connection string is malformed or is one for another account.
        KeyInvalid: the partition is empty or too long.
    """

    def __init__(
        self,
        endpoint: str | None,
        table: str,
        partition: str,
        login: TableCredential,
        *,
        timeout: timedelta = CALL_TIMEOUT,
    ) -> None:
        self._timeout = timeout
        self._partition = write_key(partition)
        self._client = _client(endpoint, table, login)
        self._unsettled: OrderedDict[tuple[str, str, str | None], str] = OrderedDict()
        self._lock = threading.Lock()
        self._place = TableContext(self._client.url.partition("?")[0], table, login.name)
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
        return self._write(key, value, None, self._client.create_entity)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """Overwrite the row if it still has this version, and return the new etag."""
        same = MatchConditions.IfNotModified

        def send(entity: Mapping[str, str], **timeouts: Any) -> Mapping[str, Any]:
            return self._client.update_entity(entity, UpdateMode.REPLACE, etag=etag, match_condition=same, **timeouts)

        return self._write(key, value, etag, send)

    def delete(self, key: str, etag: str | None = None) -> None:
        """Remove the row; a row that is not there is no error unless an etag was given."""
        where = (self._partition, write_key(key))
        if etag is None:
            self._call(key, lambda **timeouts: self._client.delete_entity(*where, **timeouts))
            return

        def send(**timeouts: Any) -> bool:
            status: list[int] = []  # the SDK itself takes a row that is gone for one deleted
            self._client.delete_entity(
                *where,
                etag=etag,
                match_condition=MatchConditions.IfNotModified,
                raw_response_hook=lambda response: status.append(response.http_response.status_code),
                **timeouts,
            )
            return HTTPStatus.NOT_FOUND not in status

        answer, unsure = self._send(key, send)
        if answer is True:
            return
        if unsure:
            raise self._unsure(key)
        if answer is False:
            raise RowChanged(f"Row {key!r} is gone; version {etag} was expected. Read it again.")
        raise translate(answer, self._place, key) from cause(answer)

    def query(self, prefix: str) -> Iterator[Row]:
        """Yield all rows whose key starts with ``prefix``, page by page."""
        low, high = key_range(prefix)
        parameters = {"partition": self._partition, "low": low, "high": high}
        token: Any = None

        def page(**timeouts: Any) -> tuple[list[TableEntity], Any]:
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

    def _find(self, key: str, written: str) -> TableEntity | None:
        def attempt(**timeouts: Any) -> TableEntity | None:
            try:
                return self._client.get_entity(self._partition, written, **timeouts)
            except VENDOR_ERRORS as error:
                if row_is_missing(error):
                    return None
                raise

        return self._call(key, attempt)

    def _write(
        self, key: str, value: Mapping[str, Any], etag: str | None, send: Callable[..., Mapping[str, Any]]
    ) -> str:
        """Write the row and return its new etag.

        Args:
            key: of the row.
            value: of the row.
            etag: that the row must have, ``None`` where there must be no row.
            send: takes the entity and time-outs.
        """
        written, text = write_key(key), write_value(key, value)
        call = (written, text, etag)
        with self._lock:
            earlier = self._unsettled.pop(call, None)
        nonce = earlier or secrets.token_hex(8)
        pieces = {f"{_PIECE}{index:02d}": piece for index, piece in enumerate(cut(text))}
        entity = {"PartitionKey": self._partition, "RowKey": written, _NONCE: nonce, **pieces}
        try:
            answer, unsure = self._send(key, lambda **timeouts: str(send(entity, **timeouts)["etag"]))
            if isinstance(answer, str):
                return answer
            # One of our own attempts, or a proxy that repeats calls, may have written the row and lost the answer.
            found = self._find(key, written)
        except TableUnavailable:
            with self._lock:
                self._unsettled[call] = nonce
                while len(self._unsettled) > _UNSETTLED:
                    self._unsettled.popitem(last=False)
            raise
        if found is not None and found.get(_NONCE) == nonce:
            return str(found.metadata["etag"])
        raise (self._unsure(key) if unsure or earlier else translate(answer, self._place, key)) from cause(answer)

    def _send(self, key: str, send: Callable[..., T]) -> tuple[T | Exception, bool]:
        """Return the answer, or the error that says that the row is not as expected.

        The second value tells whether an earlier attempt, whose answer was lost, may have been carried out.
        """
        unsure = False

        def attempt(**timeouts: Any) -> T | Exception:
            nonlocal unsure
            try:
                return send(**timeouts)
            except VENDOR_ERRORS as error:
                if isinstance(translate(error, self._place, key), (RowExists, RowChanged)):
                    return error
                unsure = unsure or may_have_arrived(error)
                raise

        answer = self._call(key, attempt)
        return answer, unsure

    def _unsure(self, key: str) -> TableUnavailable:
        return TableUnavailable(
            f"Table {self._place.table!r} of {self._place.account}, row {key!r}: the answer to the first attempt was "
            "lost, and by now somebody else has changed the row. The call may or may not have been carried out before; "
            "read the row again."
        )

    def _ensure_table(self) -> None:
        def exists(**timeouts: Any) -> bool:
            try:
                self._client.get_entity(self._partition, "=", **timeouts)  # no key is written like this
            except VENDOR_ERRORS as error:
                if row_is_missing(error):
                    return True
                if error_code(error) == "TableNotFound":
                    return False
                raise
            return True

        def create(**timeouts: Any) -> None:
            try:
                self._client.create_table(**timeouts)
            except VENDOR_ERRORS as error:
                if error_code(error) != "TableAlreadyExists":  # another node was faster
                    raise

        # Asking first also serves identities that may use the table but not make one.
        if not self._call(None, exists, opening=True):
            self._call(None, create, opening=True, timeout=_DELETION_TIMEOUT)

    def _call(
        self, key: str | None, send: Callable[..., T], *, opening: bool = False, timeout: timedelta | None = None
    ) -> T:
        """Call the SDK, retry what may be repeated, and raise our errors."""

        def attempt(left_s: float) -> T:
            return send(connection_timeout=min(_CONNECT_TIMEOUT_S, left_s), read_timeout=min(_READ_TIMEOUT_S, left_s))

        def passing(error: BaseException) -> bool:
            return isinstance(error, VENDOR_ERRORS) and isinstance(translate(error, self._place, key), TableUnavailable)

        try:
            return retry(attempt, passing, timeout or self._timeout, retry_after)
        except VENDOR_ERRORS as error:
            raise translate(error, self._place, key, opening=opening) from cause(error)


def _client(endpoint: str | None, table: str, login: TableCredential) -> TableClient:
    # No retries of the SDK's own beneath ours.
    options: dict[str, Any] = {"transport": Transport(_CONNECTIONS), "retry_total": 0}
    if login.connection_string is None:
        assert endpoint is not None
        return TableClient(endpoint, table, credential=login.token, **options)
    try:
        client = TableClient.from_connection_string(login.connection_string, table, **options)
    except ValueError as error:
        raise UsageError(
            f"The {login.name} cannot be read: {error}. Copy it again from the storage account's page 'Access keys' or "
            "'Shared access signature'."
        ) from error
    if endpoint is not None and _address(endpoint) != _address(client.url):
        client.close()
        raise UsageError(
            f"The rendezvous endpoint is {endpoint!r}, but the {login.name} is for {client.url.partition('?')[0]!r}. "
            "Make them agree, or leave one of them out."
        )
    return client


def _address(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc.lower(), parts.path.strip("/")


def _row(entity: TableEntity) -> Row:
    key = read_key(entity["RowKey"])
    text = "".join(entity[name] for name in sorted(entity) if name.startswith(_PIECE))
    timestamp = entity.metadata["timestamp"]
    assert timestamp is not None  # the service gives every row one
    return Row(key, read_value(key, text), str(entity.metadata["etag"]), timestamp)
