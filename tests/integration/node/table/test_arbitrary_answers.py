"""Arbitrary HTTP answers in the table's place: each call gives what its contract says, and soon, or is unavailable."""

import json
import os
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from azureml_elastic.errors import RowChanged, RowExists, TableError, TableForbidden, TableNotFound, TableUnavailable
from azureml_elastic.ipc import Authenticator, Peer
from azureml_elastic.node.azure.credentials import TableCredential
from azureml_elastic.node.core.round import Member, NewestRound, Round
from azureml_elastic.node.rendezvous.rows import Rows, RunKey
from azureml_elastic.node.table import Row
from azureml_elastic.node.table.azure import AzureTable
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string

EXAMPLES = int(os.environ.get("ATTACK_ANSWERS", "60"))
ETAG = "W/\"datetime'2026-01-01T00%3A00%3A00.0000000Z'\""
PERMANENT = (TableForbidden, TableNotFound)


def answer(status, document=None, code="", kind="application/json", named=True, **headers):
    """An answer as bytes; ``named``: with the headers by which storage services are known."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    if document is None:
        body = b"" if not code else json.dumps({"odata.error": {"code": code, "message": {"value": "no"}}}).encode()
    fields = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
    if named:
        fields |= {"x-ms-version": "2019-02-02", "x-ms-request-id": "7"}
    if code:
        fields["x-ms-error-code"] = code
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode("latin-1", "replace") + body


ROW = {
    "odata.etag": ETAG,
    "PartitionKey": "run",
    "RowKey": "row",
    "Timestamp": "2026-01-01T00:00:00Z",
    "nonce": "n",
    "value00": '{"n": 1}',
}
NO_ROW = answer(404, code="ResourceNotFound")
NO_TABLE = answer(404, code="TableNotFound")
EXISTS = answer(409, code="EntityAlreadyExists")
CHANGED = answer(412, code="UpdateConditionNotSatisfied")
FOUND = answer(200, ROW)


class Impostor:
    """A server that answers calls with given bytes, and the last of them for ever."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.answers = [NO_ROW]
        self.calls = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def say(self, *answers):
        self.answers, self.calls = list(answers), 0

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client):
        with client, client.makefile("rb") as reader:
            try:
                while line := reader.readline():
                    length = 0
                    while line not in (b"\r\n", b"\n", b""):
                        name, _, value = line.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                        line = reader.readline()
                    reader.read(length)
                    self.calls += 1
                    data = self.answers[min(self.calls, len(self.answers)) - 1]
                    client.sendall(data)
                    if b"Content-Length" not in data or data.count(b"\r\n\r\n") != 1:
                        return
            except OSError:
                return


@pytest.fixture(scope="module")
def impostor():
    with closing(Impostor()) as made:
        yield made


@contextmanager
def opened(impostor, seconds):
    impostor.say(NO_ROW)
    endpoint = f"http://127.0.0.1:{impostor.port}/{EMULATOR_ACCOUNT}"
    login = TableCredential("the test's key", connection_string=emulator_connection_string(endpoint))
    with closing(AzureTable(None, "t", "run", login)) as table:
        table._timeout = timedelta(seconds=seconds)
        yield table


@pytest.fixture(scope="module")
def hasty(impostor):
    """A table that gives up after one or two attempts."""
    with opened(impostor, 0.02) as table:
        yield table


def calls(table):
    """Each call of the protocol, with the errors that its contract has beside those of all."""
    return {
        "get": (lambda: table.get("row"), ()),
        "insert": (lambda: table.insert("row", {"n": 2}), (RowExists,)),
        "replace": (lambda: table.replace("row", {"n": 2}, ETAG), (RowChanged,)),
        "delete": (lambda: table.delete("row"), ()),
        "delete this version": (lambda: table.delete("row", ETAG), (RowChanged,)),
        "query": (lambda: list(table.query("r")), ()),
    }


def is_right(name, value):
    if name in ("insert", "replace"):
        return isinstance(value, str) and value
    if name == "query":
        return all(isinstance(row, Row) and row.key.startswith("r") and row.etag for row in value)
    if name == "get":
        return value is None or (isinstance(value, Row) and value.key == "row" and value.etag)
    return value is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
row_like = st.fixed_dictionaries(
    {},
    optional={name: st.just(value) | st.just(value) | json_values for name, value in ROW.items()}
    | {"RowKey": st.sampled_from(["row", "row", "round.0", "round.0=21key", "round.1.node", "other", "=", ""])}
    | {"value00@odata.type": st.sampled_from(["Edm.Int64", "Edm.Binary", "Edm.DateTime", "Edm.Guid", "x"])},
)
documents = st.one_of(
    row_like,
    json_values,
    st.builds(lambda rows: {"value": rows}, st.lists(row_like, max_size=3) | json_values),
    st.builds(lambda value: {"odata.error": value}, json_values),
    st.binary(max_size=40),
    st.sampled_from(
        [None, b"<html>moved</html>", b'<?xml version="1.0"?><Error><Code>BlobNotFound</Code></Error>', b"{"]
    ),
)
OUR_CODES = ["ResourceNotFound", "EntityAlreadyExists", "UpdateConditionNotSatisfied", "TableNotFound", "ServerBusy"]
OTHER_CODES = ["", "TableAlreadyExists", "AuthorizationFailure", "InvalidInput", "BlobNotFound", "ContainerNotFound"]
codes = st.sampled_from(OUR_CODES + OTHER_CODES)
statuses = st.sampled_from(
    [200, 201, 202, 204, 206, 304, 400, 401, 403, 404, 405, 409, 410, 412, 413, 418, 429, 500, 503]
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "ETag": st.sampled_from([ETAG, "", "x"]),
        "Retry_After": st.sampled_from(["1", "-1", "9" * 400, "soon"]),
        "Content_Encoding": st.sampled_from(["gzip", "x"]),
        "x-ms-continuation-NextRowKey": st.sampled_from(["row", ""]),
        "x-ms-continuation-NextPartitionKey": st.sampled_from(["run", ""]),
    },
)
kinds = st.sampled_from(
    [
        "application/json",
        "application/json;odata=minimalmetadata",
        "application/xml",
        "text/html",
        "text/json; charset=x",
    ]
)
answers = st.one_of(
    st.builds(
        lambda status, document, code, kind, named, more: answer(status, document, code, kind, named, **more),
        statuses, documents, codes, kinds, st.booleans(), headers,
    ),
    st.binary(max_size=60),
    st.sampled_from([NO_ROW, NO_TABLE, EXISTS, CHANGED, FOUND]),
)  # fmt: skip
few = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # calls take their time until they give up: shrinking takes minutes
    derandomize="ATTACK_ANSWERS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


@few
@example([answer(404, {})])
@example([answer(200, {})])
@example([answer(200, {"value": [{}]})])
@example([answer(204)])
@example([CHANGED, answer(200, {**ROW, "RowKey": "other"})])
@given(st.lists(answers, min_size=1, max_size=4))
def test_each_call_gives_what_its_contract_says(impostor, hasty, said):
    for name, (call, refusals) in calls(hasty).items():
        impostor.say(*said)
        outcome = None
        try:
            outcome = call()
        except (TableError, *PERMANENT) as error:
            refused = error
        else:
            refused = None
        assert refused is not None or is_right(name, outcome), name
        assert not isinstance(refused, (RowExists, RowChanged)) or isinstance(refused, refusals), (name, refused)


@few
@example([answer(200, {**ROW, "RowKey": "round.0", "value00": "{}"})])
@example([answer(200, {**ROW, "RowKey": "round.0", "value00": '{"number": 1, "state": "open", "members": [{}]}'})])
@example([answer(200, {**ROW, "RowKey": "round.0=21key", "value00": '{"key": 1}'})])
@example([answer(200, {"value": [{**ROW, "RowKey": "round.0", "value00": '{"number": "x", "state": "open"}'}]})])
@given(st.lists(answers, min_size=1, max_size=4))
def test_a_member_of_a_round_only_ever_waits(impostor, hasty, said):
    class Enough(Exception):
        pass

    def pause(_):
        raise Enough

    for look in (
        lambda rows: rows.observe(rows.look()),
        lambda rows: rows.read_all(),
        lambda rows: rows.read_member("node"),
        lambda rows: rows.refresh_key(),
        lambda rows: rows.read_round(),
        lambda rows: rows.end_round(3, Round(4)),
        lambda rows: rows.write_member(Member("node", "i", "h", 1)),
    ):
        impostor.say(*said)
        rows = Rows(hasty, pause, NewestRound(), RunKey(hasty, time.monotonic, Authenticator(Peer("a", "i-a"), "hub")))
        rows.persistent = True
        with suppress(TableUnavailable, Enough):
            look(rows)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("insert", [NO_ROW]),
        ("insert", [CHANGED]),
        ("insert", [EXISTS, NO_ROW, EXISTS, NO_ROW, EXISTS, NO_ROW, EXISTS]),
        ("replace", [EXISTS]),
        ("replace", [CHANGED, FOUND, CHANGED, FOUND, CHANGED, FOUND, CHANGED]),
        ("delete this version", [CHANGED, FOUND, CHANGED, FOUND, CHANGED, FOUND, CHANGED]),
        ("delete", [answer(404, {"error": "no such page"})]),
        ("get", [answer(404, {"error": "no such page"})]),
        ("get", [answer(200, {**ROW, "RowKey": "other"})]),
        ("query", [NO_ROW]),
        ("query", [answer(200, {"items": []})]),
    ],
)
def test_a_refusal_that_the_row_contradicts_or_the_call_cannot_get_is_none(impostor, hasty, name, said):
    impostor.say(*said)
    with pytest.raises(TableUnavailable):
        calls(hasty)[name][0]()


@pytest.mark.parametrize("rows", [[], [ROW]], ids=["empty ones", "the same one"])
def test_a_query_whose_pages_never_end_is_given_up(impostor, hasty, rows):
    more = {"x-ms-continuation-NextRowKey": "row", "x-ms-continuation-NextPartitionKey": "run"}
    impostor.say(answer(200, {"value": rows}, **more))
    with pytest.raises(TableUnavailable, match="pages that repeat"):
        calls(hasty)["query"][0]()


def test_refusals_without_end_are_asked_for_with_growing_pauses(impostor):
    with opened(impostor, 2.0) as table:
        impostor.say(*[CHANGED, FOUND] * 200)
        with pytest.raises(TableUnavailable):
            table.replace("row", {"n": 2}, ETAG)
    assert impostor.calls < 40


def test_a_refusal_that_is_true_after_all_is_reported_at_once(impostor, hasty):
    newer = answer(200, {**ROW, "odata.etag": ETAG.replace("2026", "2027")})
    impostor.say(CHANGED, FOUND, CHANGED, newer)
    with opened(impostor, 10.0) as table:
        impostor.say(CHANGED, FOUND, CHANGED, newer)
        with pytest.raises(TableUnavailable, match="may or may not"):
            table.replace("row", {"n": 2}, ETAG)
        impostor.say(CHANGED, newer)
        with pytest.raises(RowChanged):
            table.replace("row", {"n": 3}, ETAG)
        assert impostor.calls == 2
