"""The one place where errors of the Azure SDK become ours.

Decided by what the service said: its error code first, then the HTTP status, then the exception's class. The result
never holds a secret: request addresses may carry a signature, and those are blanked.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

from azureml_elastic.errors import (
    ElasticError,
    MissingExtra,
    RowChanged,
    RowExists,
    TableError,
    TableForbidden,
    TableNotFound,
    TableUnavailable,
    ValueTooLarge,
)

try:
    from azure.core.exceptions import (
        AzureError,
        ClientAuthenticationError,
        DecodeError,
        DeserializationError,
        HttpResponseError,
        ResourceExistsError,
        ResourceModifiedError,
        ResourceNotFoundError,
        ResourceNotModifiedError,
        SerializationError,
        ServiceRequestError,
        ServiceRequestTimeoutError,
        ServiceResponseError,
    )
    from urllib3.exceptions import NewConnectionError
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

__all__ = [
    "VENDOR_ERRORS",
    "TableContext",
    "cause",
    "error_code",
    "may_have_arrived",
    "may_pass",
    "retry_after",
    "row_is_missing",
    "translate",
]

VENDOR_ERRORS = (AzureError, SerializationError, DeserializationError)
"""All that a call to the SDK may raise."""

_TOO_LARGE = frozenset({"RequestBodyTooLarge", "EntityTooLarge", "PropertyValueTooLarge", "TooManyProperties"})
_TRANSIENT = frozenset({"TableBeingDeleted", "AccountBeingCreated", "OperationTimedOut", "ServerBusy"})
_REFUSED = frozenset({"AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"})
_STATUS_OF_CLASS: dict[type[HttpResponseError], int] = {
    ClientAuthenticationError: 401,
    ResourceNotFoundError: 404,
    ResourceExistsError: 409,
    ResourceModifiedError: 412,
    ResourceNotModifiedError: 412,
}
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_SECRET = re.compile(r"(?i)\b(sig|AccountKey|SharedAccessSignature|access_token)=[^&;\s'\")]+")


@dataclass(frozen=True)
class TableContext:
    """Which table was asked, and as whom; for the messages.

    Args:
        account: the account's URL, without a query.
        table: the table's name.
        identity: who we are, in words.
    """

    account: str
    table: str
    identity: str


def translate(error: Exception, place: TableContext, key: str | None, *, opening: bool = False) -> ElasticError:
    """Return our error for one of the SDK's.

    Args:
        error: one of :data:`VENDOR_ERRORS`.
        place: which table was asked.
        key: the row, ``None`` for calls that concern no single one.
        opening: an account that cannot be reached counts as one that does not exist.
    """
    where = f"Table {place.table!r} of {place.account}"
    row = "" if key is None else f", row {key!r}"
    said = _said(error)
    if isinstance(error, ServiceRequestError):
        if opening:
            return TableNotFound(
                f"{where} cannot be reached: {said}. Check the account's name and that this machine may connect to it: "
                "firewall, private endpoint, proxy."
            )
        return TableUnavailable(f"{where}{row} cannot be reached: {said}. The call may be repeated.")
    if isinstance(error, (ServiceResponseError, DecodeError)):
        return TableUnavailable(
            f"{where}{row} gave no readable answer: {said}. The call may or may not have been carried out, and may be "
            "repeated."
        )
    if not isinstance(error, HttpResponseError):
        return TableError(f"{where}{row}: the call failed: {said}.")
    status, code = _status(error), error_code(error)
    if code in _TRANSIENT or (status in _RETRYABLE_STATUS and code not in _TOO_LARGE):
        return TableUnavailable(f"{where}{row} is not available (HTTP {status}): {said}. The call may be repeated.")
    if code in _TOO_LARGE or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return ValueTooLarge(f"{where}{row}: the service refused the row's size: {said}. Nothing was written.")
    if code in _REFUSED or status in (401, 403):
        return TableForbidden(
            f"{where} refuses {place.identity} (HTTP {status}): {said}. Grant that identity the role 'Storage Table "
            "Data Contributor' on the storage account (it takes some minutes to become effective), and check that the "
            "account's firewall admits this machine."
        )
    if code in ("TableNotFound", "AccountNotFound"):
        return TableNotFound(f"{where} does not exist: {said}. Was it deleted while the run was on?")
    if status == HTTPStatus.NOT_FOUND:
        return RowChanged(f"{where}{row} is gone. Nothing was written; read it again.")
    if status == HTTPStatus.CONFLICT:
        return RowExists(f"{where}{row} exists already. Nothing was written; read it, or replace it by its etag.")
    if status in (304, 412):
        return RowChanged(f"{where}{row} has another version by now. Nothing was written; read it again.")
    return TableError(f"{where}{row}: the service refused the call (HTTP {status}): {said}.")


def may_have_arrived(error: Exception) -> bool:
    """Whether the service may have carried out the call although it failed."""
    if isinstance(error, HttpResponseError) and not isinstance(error, DecodeError):
        return _status(error) in (408, 500, 502, 503, 504)
    # The SDK also calls it a failed request when the connection breaks within the answer.
    never_sent = isinstance(error, ServiceRequestTimeoutError) or (
        isinstance(error, ServiceRequestError) and isinstance(error.inner_exception, NewConnectionError)
    )
    return not never_sent


def may_pass(error: ElasticError) -> bool:
    """Whether opening the table may succeed later on, which it will not where no such host or account exists.

    Args:
        error: that opening it has raised.
    """
    if isinstance(error, TableUnavailable):
        return True
    links = list(_chain(error))
    return any(isinstance(link, ServiceRequestError) for link in links) and not any(
        isinstance(link, socket.gaierror) and link.errno == socket.EAI_NONAME for link in links
    )


def retry_after(error: BaseException) -> float:
    """Return for how many seconds the service wishes to be left alone, 0 where it does not say."""
    response = getattr(error, "response", None)
    wish = "" if response is None else str(response.headers.get("Retry-After") or "")
    return float(wish) if wish.isascii() and wish.isdecimal() else 0.0


def row_is_missing(error: Exception) -> bool:
    """Whether the service said that the table has no such row."""
    missing = isinstance(error, HttpResponseError) and _status(error) == HTTPStatus.NOT_FOUND
    return missing and error_code(error) != "TableNotFound"


def cause(error: Exception) -> Exception | None:
    """Return the error for ``raise … from``, or ``None`` where its text would show a secret in the traceback."""
    return None if any(_SECRET.search(f"{link} {link.args}") for link in _chain(error)) else error


def error_code(error: Exception) -> str:
    """Return the service's own name for what went wrong, empty where it gave none."""
    code = getattr(error, "error_code", None)
    if code:
        return str(getattr(code, "value", code))
    response = getattr(error, "response", None)
    if response is None:
        return ""
    header = response.headers.get("x-ms-error-code")
    if header:
        return str(header)
    try:
        return str(json.loads(response.text())["odata.error"]["code"])
    except (ValueError, KeyError, TypeError, AzureError):
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that have led to it."""
    link: BaseException | None = error
    while link is not None:
        yield link
        inner: BaseException | None = getattr(link, "inner_exception", None)  # how the SDK keeps its causes
        link = link.__cause__ or inner or link.__context__


def _status(error: HttpResponseError) -> int | None:
    if error.status_code is not None:
        return int(error.status_code)
    return next((status for kind, status in _STATUS_OF_CLASS.items() if isinstance(error, kind)), None)


def _said(error: Exception) -> str:
    """Return the error's first sentence on one line and without secrets."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _SECRET.sub(r"\1=***", lines[0]).rstrip(". ")
