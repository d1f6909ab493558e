"""Translation of Azure SDK errors into errors of this package.

The error code of the service decides, then the exception class. An answer without a code of the table service is that
of something else, whatever its HTTP status, and the table counts as unavailable. Messages never hold a secret:
signatures in request addresses are blanked.
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
    from azure.data.tables import TableErrorCode
    from urllib3.exceptions import NewConnectionError
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

VENDOR_ERRORS = (sdk.AzureError, sdk.SerializationError, sdk.DeserializationError)
"""All exceptions that a call to the SDK may raise."""

_TOO_LARGE = frozenset({"RequestBodyTooLarge", "EntityTooLarge", "PropertyValueTooLarge", "TooManyProperties"})
_TRANSIENT = frozenset({"TableBeingDeleted", "AccountBeingCreated", "OperationTimedOut", "ServerBusy", "InternalError"})
_REFUSED = frozenset({"AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"})
_NO_TABLE = frozenset({"TableNotFound", "AccountNotFound"})
_NO_ROW = frozenset({"ResourceNotFound", "EntityNotFound"})
_EXISTS = frozenset({"EntityAlreadyExists", "ResourceAlreadyExists", "TableAlreadyExists"})
_CHANGED = frozenset({"UpdateConditionNotSatisfied", "ConditionNotMet"})
_OF_THE_TABLE = frozenset(code.value for code in TableErrorCode) | _NO_TABLE
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_SECRET = re.compile(r"(?i)\b(sig|AccountKey|SharedAccessSignature|access_token)=[^&;\s'\")]+")


@dataclass(frozen=True)
class TableContext:
    """Table and identity, for error messages.

    Args:
        account: URL of the account, without a query.
    """

    account: str
    table: str
    identity: str


def translate(error: Exception, context: TableContext, key: str | None, *, opening: bool = False) -> ElasticError:
    """Return the error of this package for one of the SDK's.

    Args:
        error: one of :data:`VENDOR_ERRORS`.
        key: key of the row, ``None`` for calls that concern no single row.
        opening: whether an account that cannot be reached counts as missing, and a refusal without a code as one of the
            table: nothing is lost yet, and the advice helps.
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
    status, code = error.status_code, error_code(error)
    if code in _TRANSIENT or (status in _RETRYABLE_STATUS and code not in _TOO_LARGE):
        return TableUnavailable(f"{where}{row} is not available (HTTP {status}): {reason}. The call may be repeated.")
    if code in _TOO_LARGE:
        return ValueTooLarge(f"{where}{row}: the service refused the row's size: {reason}. Nothing was written.")
    # Without an answer, the identity's own service has given no token. Storage has more codes of refusal than the SDK.
    if (
        code in _REFUSED
        or (status in (401, 403) and (code or opening))
        or isinstance(error, sdk.ClientAuthenticationError)
    ):
        return TableForbidden(
            f"{where} refuses {context.identity} (HTTP {status}): {reason}. Grant that identity the role "
            "'Storage Table Data Contributor' on the storage account (it takes some minutes to become effective), and "
            "check that the account's firewall admits this machine."
        )
    if code in _NO_TABLE:
        return TableNotFound(f"{where} does not exist: {reason}. It may have been deleted during the run.")
    if code in _NO_ROW:
        return RowChanged(f"{where}{row} is gone. Nothing was written; read it again.")
    if code in _EXISTS:
        return RowExists(f"{where}{row} exists already. Nothing was written; read it, or replace it by its etag.")
    if code in _CHANGED:
        return RowChanged(f"{where}{row} has another version by now. Nothing was written; read it again.")
    if code not in _OF_THE_TABLE:
        return TableUnavailable(
            f"{where}{row}: the answer (HTTP {status}, {f'code {code!r}' if code else 'no error code'}) is not that of "
            f"a table: {reason}. Something stands in between, or another service has its address. The call may be "
            "repeated."
        )
    return TableError(f"{where}{row}: the service refused the call (HTTP {status}): {reason}.")


def foreign_answer(reason: str) -> sdk.ServiceResponseError:
    """Return the retryable error for an answer that the table does not give to such a call."""
    return sdk.ServiceResponseError(f"the answer is not one that the table gives: {reason}")


def may_have_arrived(error: Exception) -> bool:
    """Return whether the service may have carried out the call although it failed."""
    if isinstance(error, sdk.HttpResponseError) and not isinstance(error, sdk.DecodeError):
        # Something in between answers with any status, also to a call that it has passed on.
        unknown = error_code(error) not in _OF_THE_TABLE and error.status_code != HTTPStatus.TOO_MANY_REQUESTS
        return error.status_code in (408, 500, 502, 503, 504) or unknown
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
    return isinstance(error, sdk.HttpResponseError) and error_code(error) in _NO_ROW


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


def _summary(error: Exception) -> str:
    """Return the first sentence of the error on one line and without secrets."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _SECRET.sub(r"\1=***", lines[0]).rstrip(". ")
