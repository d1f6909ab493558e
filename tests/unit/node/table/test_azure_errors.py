"""Every error of the Azure SDK becomes one of ours."""

import http
import inspect
import json

import azure.core.exceptions
import azure.data.tables
import pytest
import requests
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ServiceRequestError,
    ServiceRequestTimeoutError,
    ServiceResponseError,
)
from azure.core.rest import HttpRequest
from urllib3.exceptions import NewConnectionError

from azureml_elastic import errors
from azureml_elastic.node.table.azure_errors import (
    VENDOR_ERRORS,
    TableContext,
    cause,
    error_code,
    may_have_arrived,
    translate,
)

PLACE = TableContext("https://acc.table.core.windows.net", "elastic", "the node's managed identity (client id 7)")
DOCUMENTED = (
    errors.TableError,
    errors.TableForbidden,
    errors.TableNotFound,
)
CLASSES = sorted(
    {
        kind
        for module in (azure.core.exceptions, azure.data.tables)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, VENDOR_ERRORS)
    },
    key=lambda kind: kind.__name__,
)


class Response:
    """An HTTP answer as the SDK's errors hold it."""

    def __init__(self, status, code=""):
        self.status_code = status
        self.reason = "reason"
        self.headers = {"x-ms-error-code": code} if code else {}
        self.content_type = "application/json"
        self.request = HttpRequest("GET", "https://acc.table.core.windows.net")
        document = {"odata.error": {"code": code, "message": {"value": "no"}}}
        self._body = json.dumps(document) if code else "<html>"

    def text(self, encoding=None):
        return self._body

    def body(self):
        return self._body.encode()


def made(kind):
    parameters = inspect.signature(kind.__init__).parameters
    if issubclass(kind, azure.core.exceptions.TooManyRedirectsError):
        return kind([])
    if issubclass(kind, HttpResponseError):
        return kind(message="it failed", response=Response(599))
    names = [name for name in list(parameters)[1:] if name not in ("args", "kwargs")]
    return kind("it failed") if names == ["message"] or not names else kind(Response(200))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("opening", [False, True])
def test_every_class_is_mapped(kind, opening):
    ours = translate(made(kind), PLACE, "key", opening=opening)
    assert isinstance(ours, DOCUMENTED)
    assert "acc.table.core.windows.net" in str(ours)


@pytest.mark.parametrize("status", [int(status) for status in http.HTTPStatus if status >= 300])
def test_a_status_without_a_code_of_the_table_is_nothing_that_the_table_says(status):
    for code in ("", "BlobNotFound"):
        error = HttpResponseError(message="no", response=Response(status, code))
        ours = translate(error, PLACE, "key")
        # Storage has more codes of refusal than the SDK knows.
        expected = dict.fromkeys((401, 403), errors.TableForbidden) if code else {}
        assert type(ours) is expected.get(status, errors.TableUnavailable)
        assert "'key'" in str(ours) or isinstance(ours, errors.TableForbidden)
        assert may_have_arrived(error) is (status != 429)


@pytest.mark.parametrize("code", list(azure.data.tables.TableErrorCode), ids=str)
def test_every_code_of_the_service_is_mapped(code):
    status = 409 if code.value in ("TableBeingDeleted", "EntityAlreadyExists") else 400
    ours = translate(HttpResponseError(message="no", response=Response(status, code.value)), PLACE, "key")
    expected = {
        "AccountBeingCreated": errors.TableUnavailable,
        "TableBeingDeleted": errors.TableUnavailable,
        "OperationTimedOut": errors.TableUnavailable,
        "ServerBusy": errors.TableUnavailable,
        "InternalError": errors.TableUnavailable,
        **dict.fromkeys(("EntityAlreadyExists", "ResourceAlreadyExists", "TableAlreadyExists"), errors.RowExists),
        **dict.fromkeys(("ResourceNotFound", "EntityNotFound"), errors.RowChanged),
        **dict.fromkeys(("UpdateConditionNotSatisfied", "ConditionNotMet"), errors.RowChanged),
        "TableNotFound": errors.TableNotFound,
        **dict.fromkeys(
            ("RequestBodyTooLarge", "EntityTooLarge", "PropertyValueTooLarge", "TooManyProperties"),
            errors.ValueTooLarge,
        ),
        **dict.fromkeys(
            ("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"), errors.TableForbidden
        ),
    }
    assert type(ours) is expected.get(code.value, errors.TableError)


def test_who_is_refused_learns_account_identity_and_role():
    ours = translate(ClientAuthenticationError("no token"), PLACE, None)
    for part in (PLACE.account, PLACE.identity, "Storage Table Data Contributor", "no token"):
        assert part in str(ours)


def test_an_account_that_cannot_be_reached_is_missing_only_while_opening():
    for kind in (ServiceRequestError, ServiceRequestTimeoutError):
        assert type(translate(kind("DNS"), PLACE, None, opening=True)) is errors.TableNotFound
        assert type(translate(kind("DNS"), PLACE, None)) is errors.TableUnavailable


def test_the_code_is_found_in_header_body_or_nowhere():
    response = Response(400, "EntityTooLarge")
    assert error_code(HttpResponseError(response=response)) == "EntityTooLarge"
    response.headers = {}
    assert error_code(HttpResponseError(response=response)) == "EntityTooLarge"
    assert error_code(HttpResponseError(response=Response(400))) == ""
    assert error_code(AzureError("x")) == ""


def test_which_failures_leave_a_doubt():
    def answered(status, code=""):
        return HttpResponseError(response=Response(status, code))

    within_the_answer = ServiceRequestError("x", error=requests.ConnectionError("Read timed out"))
    doubtful = [ServiceResponseError("x"), IncompleteReadError("x"), within_the_answer, answered(500)]
    assert all(map(may_have_arrived, doubtful))
    refused = ServiceRequestError("x", error=NewConnectionError(None, "refused"))
    certain = [refused, ServiceRequestTimeoutError("x"), answered(429)]
    certain += [answered(409, "EntityAlreadyExists"), answered(403, "AuthorizationFailure")]
    assert not any(map(may_have_arrived, certain))


@pytest.mark.parametrize(
    "secret",
    [
        "/Tables?sv=1&sig=s3cret%2B&se=2",
        "AccountKey=s3cret==;Table",
        "SharedAccessSignature=s3cret&x",
        "access_token=s3cret",
    ],
)
def test_secrets_show_neither_in_the_message_nor_in_the_cause(secret):
    error = ServiceRequestError(f"Max retries exceeded with url: {secret}")
    assert "s3cret" not in str(translate(error, PLACE, "key"))
    assert cause(error) is None
    outer = ServiceRequestError("outer")
    outer.__cause__ = error
    assert cause(outer) is None
    plain = ServiceRequestError("plain")
    assert cause(plain) is plain
