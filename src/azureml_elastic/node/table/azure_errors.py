"""Translation of Azure SDK errors into errors of this package.

The error code of the service decides first, then the HTTP status, then the exception class. Messages never hold a
secret: signatures in request addresses are blanked.
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
    from azure.core import exceptions as sdk
    from urllib3.exceptions import NewConnectionError
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

__all__ = [
    "VENDOR_ERRORS",
    "TableContext",
    "cause",
    "error_code",
    "is_temporary",
    "may_have_arrived",
    "retry_after",
    "row_is_missing",
    "translate",
]

VENDOR_ERRORS = (sdk.AzureError, sdk.SerializationError, sdk.DeserializationError)
"""All exceptions that a call to the SDK may raise."""

_TOO_LARGE = frozenset({"RequestBodyTooLarge", "EntityTooLarge", "PropertyValueTooLarge", "TooManyProperties"})
_TRANSIENT = frozenset({"TableBeingDeleted", "AccountBeingCreated", "OperationTimedOut", "ServerBusy"})
_REFUSED = frozenset({"AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"})
_STATUS_OF_CLASS: dict[type[sdk.HttpResponseError], int] = {
    sdk.ClientAuthenticationError: 401,
    sdk.ResourceNotFoundError: 404,
    sdk.ResourceExistsError: 409,
    sdk.ResourceModifiedError: 412,
    sdk.ResourceNotModifiedError: 412,
}
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_SECRET = re.compile(r"(?i)\b(sig|AccountKey|SharedAccessSignature|access_token)=[^&;\s'\")]+")


@dataclass(frozen=True)
class TableContext:
    """Table and identity, for error messages.

    Args:
        account: URL of the account, without a query.
        table: name of the table.
        identity: description of the identity.
    """

    account: str
    table: str
    identity: str


def translate(error: Exception, context: TableContext, key: str | None, *, opening: bool = False) -> ElasticError:
    """Return the error of this package for one of the SDK's.

    Args:
        error: one of :data:`VENDOR_ERRORS`.
        context: table and identity.
        key: key of the row, ``None`` for calls that concern no single row.
        opening: whether an account that cannot be reached counts as missing.
    """
    where = f"Table {context.table!r} of {context.account}"
    row = "" if key is None else f", row {key!r}"
    reason = _summary(error)
    if isinstance(error, sdk.ServiceRequestError):
        if opening:
            return TableNotFound(
                f"{where} cannot be reached: {reason}. Check the account's name and that this machine may connect "
                "to it: firewall, private endpoint, proxy."
            )
        return TableUnavailable(f"{where}{row} cannot be reached: {reason}. The call may be repeated.")
    if isinstance(error, (sdk.ServiceResponseError, sdk.DecodeError)):
        return TableUnavailable(
            f"{where}{row} gave no readable answer: {reason}. The call may or may not have been carried out, and may "
            "be repeated."
        )
    if not isinstance(error, sdk.HttpResponseError):
        return TableError(f"{where}{row}: the call failed: {reason}.")
    status, code = _status(error), error_code(error)
    if code in _TRANSIENT or (status in _RETRYABLE_STATUS and code not in _TOO_LARGE):
        return TableUnavailable(f"{where}{row} is not available (HTTP {status}): {reason}. The call may be repeated.")
    if code in _TOO_LARGE or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return ValueTooLarge(f"{where}{row}: the service refused the row's size: {reason}. Nothing was written.")
    if code in _REFUSED or status in (401, 403):
        return TableForbidden(
            f"{where} refuses {context.identity} (HTTP {status}): {reason}. Grant that identity the role "
            "'Storage Table Data Contributor' on the storage account (it takes some minutes to become effective), and "
            "check that the account's firewall admits this machine."
        )
    if code in ("TableNotFound", "AccountNotFound"):
        return TableNotFound(f"{where} does not exist: {reason}. It may have been deleted during the run.")
    if status == HTTPStatus.NOT_FOUND:
        return RowChanged(f"{where}{row} is gone. Nothing was written; read it again.")
    if status == HTTPStatus.CONFLICT:
        return RowExists(f"{where}{row} exists already. Nothing was written; read it, or replace it by its etag.")
    if status in (304, 412):
        return RowChanged(f"{where}{row} has another version by now. Nothing was written; read it again.")
    return TableError(f"{where}{row}: the service refused the call (HTTP {status}): {reason}.")


def may_have_arrived(error: Exception) -> bool:
    """Return whether the service may have carried out the call although it failed."""
    if isinstance(error, sdk.HttpResponseError) and not isinstance(error, sdk.DecodeError):
        return _status(error) in (408, 500, 502, 503, 504)
    # The SDK raises ServiceRequestError also if the connection breaks within the answer.
    never_sent = isinstance(error, sdk.ServiceRequestTimeoutError) or (
        isinstance(error, sdk.ServiceRequestError) and isinstance(error.inner_exception, NewConnectionError)
    )
    return not never_sent


def is_temporary(error: ElasticError) -> bool:
    """Return whether opening the table may succeed later; false if the host or account does not exist."""
    if isinstance(error, TableUnavailable):
        return True
    links = list(_chain(error))
    return any(isinstance(link, sdk.ServiceRequestError) for link in links) and not any(
        isinstance(link, socket.gaierror) and link.errno == socket.EAI_NONAME for link in links
    )


def retry_after(error: BaseException) -> float:
    """Return the ``Retry-After`` seconds of the answer, 0 if there is none."""
    response = getattr(error, "response", None)
    seconds = "" if response is None else str(response.headers.get("Retry-After") or "")
    return float(seconds) if seconds.isascii() and seconds.isdecimal() else 0.0


def row_is_missing(error: Exception) -> bool:
    """Return whether the service answered that the table has no such row."""
    missing = isinstance(error, sdk.HttpResponseError) and _status(error) == HTTPStatus.NOT_FOUND
    return missing and error_code(error) != "TableNotFound"


def cause(error: Exception) -> Exception | None:
    """Return the error for ``raise … from``, or ``None`` if its text holds a secret."""
    return None if any(_SECRET.search(f"{link} {link.args}") for link in _chain(error)) else error


def error_code(error: Exception) -> str:
    """Return the error code of the service, empty if it gave none."""
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
    except (ValueError, KeyError, TypeError, sdk.AzureError):
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    link: BaseException | None = error
    while link is not None:
        yield link
        inner: BaseException | None = getattr(link, "inner_exception", None)  # the SDK keeps causes here
        link = link.__cause__ or inner or link.__context__


def _status(error: sdk.HttpResponseError) -> int | None:
    if error.status_code is not None:
        return int(error.status_code)
    return next((status for kind, status in _STATUS_OF_CLASS.items() if isinstance(error, kind)), None)


def _summary(error: Exception) -> str:
    """Return the first sentence of the error on one line and without secrets."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _SECRET.sub(r"\1=***", lines[0]).rstrip(". ")
