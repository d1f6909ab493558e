"""The table in Azure Tables or its emulator Azurite.

The only importer of ``azure.data``. Each write carries a random nonce. If the service wrote a row but its answer was
lost, the retry finds the row in place, and the nonce identifies it as written by this call. A write that failed with
``TableUnavailable`` keeps its nonce: the same call, repeated, continues the same write.

An answer counts only if the table can give it to such a call. Any other one, and a refusal that the row itself
contradicts (another version is said to be there, but the row has the expected one), is repeated with growing pauses
until the time limit, and then the table is unavailable: a node keeps its state and waits, whatever stands in between.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from azureml_elastic.errors import (
    ElasticError,
    MissingExtra,
    RowChanged,
    RowExists,
    TableForbidden,
    TableUnavailable,
    UsageError,
    ValueTooLarge,
)
from azureml_elastic.node.azure.http import CALL_TIMEOUT, retry
from azureml_elastic.node.table.azure_errors import (
    VENDOR_ERRORS,
    TableContext,
    cause,
    error_code,
    foreign_answer,
    may_have_arrived,
    retry_after,
    row_is_missing,
    translate,
)
from azureml_elastic.node.table.keys import key_range, read_key, write_key
from azureml_elastic.node.table.protocol import Row
from azureml_elastic.node.table.values import cut, read_value, write_value

if TYPE_CHECKING:
    from azureml_elastic.node.azure.credentials import TableCredential

try:
    from azure.core import MatchConditions
    from azure.core.exceptions import ResourceNotFoundError
    from azure.data.tables import TableClient, TableEntity, UpdateMode
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing
from azureml_elastic.node.table.azure_transport import Transport

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 3.0
_READ_TIMEOUT_S = 4.0
_DELETION_TIMEOUT = timedelta(seconds=90)  # Azure keeps the name of a deleted table for 40 s and more
_CONNECTIONS = 256  # kept open; further threads open one per call
_PAGE = 1000
_EMPTY_PAGES = 100  # in a row, after which a query is given up
_UNSETTLED = 256  # maximum number of writes with unknown outcome; the oldest are dropped first

_NONCE = "nonce"
_PIECE = "value"


class AzureTable:
    """Rows of one run in an Azure table, created if missing, also if it is deleted later; implements ``Table``.

    Args:
        endpoint: table URL of the account; ``None`` means that of the connection string.
        partition: run id.
        timeout: time limit of one call, all attempts together.

    Raises:
        TableNotFound: the account cannot be reached.
        TableForbidden: the identity lacks a role.
        TableUnavailable: the account does not answer in time.
        UsageError: the connection string is malformed or belongs to another account.
        KeyInvalid: the partition is empty or too long.
    """

    def __init__(
        self,
        endpoint: str | None,
        table: str,
        partition: str,
        credential: TableCredential,
        *,
        timeout: timedelta = CALL_TIMEOUT,
    ) -> None:
        self.by_connection_string = credential.connection_string is not None
        self._timeout = timeout
        self._partition = write_key(partition)
        self._client = _client(endpoint, table, credential)
        self._unsettled: OrderedDict[tuple[str, str, str | None], str] = OrderedDict()
        self._lock = threading.Lock()
        self._context = TableContext(self._client.url.partition("?")[0], table, credential.name)
        try:
            self._ensure_table()
        except BaseException:
            self._client.close()
            raise

    def get(self, key: str) -> Row | None:
        """Return the row, or ``None`` if it does not exist."""
        entity = self._find(key, write_key(key))
        return None if entity is None else self._row(entity)

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        """Insert a new row and return its etag."""
        return self._write(key, value, None, self._client.create_entity)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """Replace the row if its version is ``etag``, and return the new etag."""
        same = MatchConditions.IfNotModified

        def send(entity: Mapping[str, str], **timeouts: Any) -> Mapping[str, Any]:
            return self._client.update_entity(entity, UpdateMode.REPLACE, etag=etag, match_condition=same, **timeouts)

        return self._write(key, value, etag, send)

    def delete(self, key: str, etag: str | None = None) -> None:
        """Delete the row. A missing row is an error only if an etag is given."""
        written = write_key(key)
        answers: list[Any] = []  # the SDK reports a missing row as deleted, whatever the reason of the answer
        options: dict[str, Any] = {"raw_response_hook": lambda response: answers.append(response.http_response)}
        if etag is not None:
            options |= {"etag": etag, "match_condition": MatchConditions.IfNotModified}

        def send(**timeouts: Any) -> None:
            self._client.delete_entity(self._partition, written, **{**options, **timeouts})
            if answers[-1].status_code != HTTPStatus.NOT_FOUND:
                return
            missing = ResourceNotFoundError("there is nothing to delete", response=answers[-1])
            if etag is not None or not row_is_missing(missing):
                raise missing

        if etag is None:
            self._call(key, send)
            return
        refusal, _, uncertain = self._send(key, send, etag)
        if isinstance(refusal, Exception):
            raise (self._unknown_outcome(key) if uncertain else translate(refusal, self._context, key)) from cause(
                refusal
            )

    def query(self, prefix: str) -> Iterator[Row]:
        """Yield all rows whose key starts with ``prefix``, page by page."""
        low, high = key_range(prefix)
        parameters = {"partition": self._partition, "low": low, "high": high}
        token: Any = None

        def page(**timeouts: Any) -> tuple[list[Row], Any]:
            pages = self._client.query_entities(
                "PartitionKey eq @partition and RowKey ge @low and RowKey lt @high",
                parameters=parameters,
                results_per_page=_PAGE,
                **timeouts,
            ).by_page(continuation_token=token)
            rows = [self._row(entity) for entity in next(pages, ())]
            if not all(low <= write_key(row.key) < high for row in rows):
                raise foreign_answer(f"other rows than those of {prefix!r}")
            return rows, pages.continuation_token  # type: ignore[attr-defined]  # the SDK types an Iterator

        seen: set[str] = set()
        empty = 0
        while True:
            rows, token = self._call(None, page)
            keys = {row.key for row in rows}
            if seen & keys or empty == _EMPTY_PAGES:
                error = foreign_answer("pages that repeat themselves, or pages without a row and without end")
                raise translate(error, self._context, None) from error
            yield from rows
            if not token:
                return
            seen |= keys
            empty = 0 if rows else empty + 1

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _find(self, key: str, written: str) -> TableEntity | None:
        return self._call(key, lambda **timeouts: self._look(written, **timeouts))

    def _look(self, written: str, **timeouts: Any) -> TableEntity | None:
        """Read the row in one attempt."""
        try:
            entity = self._client.get_entity(self._partition, written, **timeouts)
        except VENDOR_ERRORS as error:
            if row_is_missing(error):
                return None
            raise
        if entity["RowKey"] != written:
            raise foreign_answer("another row than the one that was asked for")
        self._row(entity)
        return entity

    def _row(self, entity: TableEntity) -> Row:
        """Return the row that the table has answered."""
        key, etag, timestamp = entity["RowKey"], entity.metadata["etag"], entity.metadata["timestamp"]
        text = "".join(entity[name] for name in sorted(entity) if name.startswith(_PIECE))
        if entity["PartitionKey"] != self._partition or not (isinstance(etag, str) and etag):
            raise foreign_answer("a row of another run, or without a version")
        if not isinstance(timestamp, datetime) or timestamp.tzinfo is None:
            raise foreign_answer("a row without a time")
        return Row(read_key(key), read_value(key, text), etag, timestamp)

    def _write(
        self, key: str, value: Mapping[str, Any], etag: str | None, send: Callable[..., Mapping[str, Any]]
    ) -> str:
        """Write the row with ``send``, a call that takes the entity and timeouts, and return its new etag."""
        written, text = write_key(key), write_value(key, value)
        call = (written, text, etag)
        with self._lock:
            earlier = self._unsettled.pop(call, None)
        nonce = earlier or secrets.token_hex(8)
        pieces = {f"{_PIECE}{index:02d}": piece for index, piece in enumerate(cut(text))}
        entity = {"PartitionKey": self._partition, "RowKey": written, _NONCE: nonce, **pieces}

        def attempt(**timeouts: Any) -> str:
            version = send(entity, **timeouts)["etag"]
            if not (isinstance(version, str) and version):
                raise foreign_answer("a write without the row's new version")
            return version

        try:
            # One of our own attempts, or a proxy that repeats calls, may have written the row and lost the answer.
            answer, found, uncertain = self._send(key, attempt, etag, nonce)
        except TableUnavailable:
            with self._lock:
                self._unsettled[call] = nonce
                # A caller that never repeats its call leaves its nonce here.
                while len(self._unsettled) > _UNSETTLED:
                    self._unsettled.popitem(last=False)
            raise
        if isinstance(answer, str):
            return answer
        if found is not None and found.get(_NONCE) == nonce:
            return str(found.metadata["etag"])
        raise (
            self._unknown_outcome(key) if uncertain or earlier else translate(answer, self._context, key)
        ) from cause(answer)

    def _send(
        self, key: str, send: Callable[..., T], etag: str | None, nonce: str = ""
    ) -> tuple[T | Exception, TableEntity | None, bool]:
        """Return the answer, or the error for a row that is not as expected and the row as it is.

        The last value is true if an earlier attempt, whose answer was lost, may have been carried out.

        Args:
            etag: version that the row must have, ``None`` if it must not exist.
        """
        uncertain = False
        written = write_key(key)

        def attempt(**timeouts: Any) -> tuple[T | Exception, TableEntity | None]:
            nonlocal uncertain
            try:
                return send(**timeouts), None
            except VENDOR_ERRORS as error:
                ours = translate(error, self._context, key)
                if isinstance(ours, ValueTooLarge) and nonce:
                    return error, None
                if not isinstance(ours, RowExists if etag is None else RowChanged):
                    uncertain = uncertain or may_have_arrived(error)
                    raise
                found = self._look(written, **timeouts)
                if found is not None and nonce and found.get(_NONCE) == nonce:
                    return error, found
                # A row never returns to an earlier version, and one that was deleted meanwhile can be inserted.
                if (None if found is None else found.metadata["etag"]) == etag:
                    uncertain = True  # what gave that answer may still pass the call on
                    raise foreign_answer(f"{ours}, but it is as it was expected") from error
                return error, found

        answer, found = self._call(key, attempt)
        return answer, found, uncertain

    def _unknown_outcome(self, key: str) -> TableUnavailable:
        return TableUnavailable(
            f"Table {self._context.table!r} of {self._context.account}, row {key!r}: the answer to the first attempt "
            "was lost, and another process has changed the row since. The call may or may not have been carried out; "
            "read the row again."
        )

    def _create_again(self, error: Exception, **timeouts: Any) -> None:
        """Create the table that was there when it was opened; raise ``error`` where this identity may not."""
        try:
            self._client.create_table(**timeouts)
        except VENDOR_ERRORS as refusal:
            if error_code(refusal) == "TableAlreadyExists":  # created by another node meanwhile
                return
            if isinstance(translate(refusal, self._context, None), TableForbidden):
                raise error from refusal
            raise
        _LOG.warning("Table %s of %s was deleted, and is created again.", self._context.table, self._context.account)

    def _ensure_table(self) -> None:
        def exists(**timeouts: Any) -> bool:
            try:
                self._client.get_entity(self._partition, "=", **timeouts)  # not the encoded form of any key
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
                if error_code(error) != "TableAlreadyExists":  # created by another node meanwhile
                    raise

        # Some identities may use the table but not create one.
        if not self._call(None, exists, opening=True):
            self._call(None, create, opening=True, timeout=_DELETION_TIMEOUT)

    def _call(
        self, key: str | None, send: Callable[..., T], *, opening: bool = False, timeout: timedelta | None = None
    ) -> T:
        """Call the SDK with retries, and raise errors of this package."""

        def attempt(left_s: float) -> T:
            timeouts = {
                "connection_timeout": min(_CONNECT_TIMEOUT_S, left_s),
                "read_timeout": min(_READ_TIMEOUT_S, left_s),
            }
            try:
                return send(**timeouts)
            except VENDOR_ERRORS as error:
                if opening or error_code(error) != "TableNotFound":
                    raise
                self._create_again(error, **timeouts)
            return send(**timeouts)

        def guarded(left_s: float) -> T:
            try:
                return attempt(left_s)
            except ElasticError:
                raise
            except VENDOR_ERRORS as error:
                if isinstance(translate(error, self._context, key), (RowExists, RowChanged, ValueTooLarge)):
                    raise foreign_answer(str(error)) from error  # where the call expects it, it never comes here
                raise
            except Exception as error:
                # The SDK, and what reads its results, fails anyhow on a document of another form.
                raise foreign_answer(f"{type(error).__name__}: {error}") from error

        def retryable(error: BaseException) -> bool:
            return isinstance(error, VENDOR_ERRORS) and isinstance(
                translate(error, self._context, key), TableUnavailable
            )

        try:
            return retry(guarded, retryable, timeout or self._timeout, retry_after)
        except VENDOR_ERRORS as error:
            raise translate(error, self._context, key, opening=opening) from cause(error)


def _client(endpoint: str | None, table: str, credential: TableCredential) -> TableClient:
    # The SDK's own retries are off: see node.azure.retry.
    options: dict[str, Any] = {"transport": Transport(_CONNECTIONS), "retry_total": 0}
    if credential.connection_string is None:
        assert endpoint is not None
        return TableClient(endpoint, table, credential=credential.token, **options)
    try:
        client = TableClient.from_connection_string(credential.connection_string, table, **options)
    except ValueError as error:
        raise UsageError(
            f"The {credential.name} cannot be read: {error}. Copy it again from the storage account's page "
            "'Access keys' or 'Shared access signature'."
        ) from error
    if endpoint is not None and _address(endpoint) != _address(client.url):
        client.close()
        raise UsageError(
            f"The rendezvous endpoint is {endpoint!r}, but the {credential.name} is for "
            f"{client.url.partition('?')[0]!r}. Make them agree, or leave one of them out."
        )
    return client


def _address(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc.lower(), parts.path.strip("/")
