"""Strikes: server times, one strike per incident, and no waiting for the table."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import RowChanged, TableUnavailable
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.round_ends import faulty_members
from azureml_elastic.node.failures.host_faults import worker_fault
from azureml_elastic.node.failures.host_strikes import STRIKE_PREFIX, HostStrikes, incident_id
from azureml_elastic.node.host.identity import host_id
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.server_time import CLOCK_PREFIX, Reading, ServerClock
from tests.support.waiting import until

HOUR, MOMENT = timedelta(hours=1), timedelta(seconds=0.1)


@pytest.fixture(params=["sqlite", "azurite"])
def table(request, tmp_path):
    if request.param == "sqlite":
        rendezvous = TableRendezvous(endpoint=str(tmp_path / "table.sqlite"))
    else:
        rendezvous = TableRendezvous(endpoint=request.getfixturevalue("azurite").endpoint, table=f"t{uuid.uuid4().hex}")
    opened = open_table(rendezvous, "run", NodeEnvironment.read({}))
    yield opened
    opened.close()


class Away:
    """A table that is unavailable until it is switched on, in front of a real backend."""

    def __init__(self, table):
        self.table = table
        self.here = threading.Event()
        self.calls = 0

    def __getattr__(self, name):
        def call(*arguments):
            self.calls += 1
            if not self.here.is_set():
                raise TableUnavailable("away")
            return getattr(self.table, name)(*arguments)

        return call


@pytest.fixture
def node(table, monkeypatch):
    """Make the strikes as nodes see them; each node reads the server's time on its own."""
    monkeypatch.setattr(
        "azureml_elastic.node.failures.host_strikes._FLUSH_SECONDS", 60.0
    )  # what is to be written is waited for
    made = []

    def make(host, name="node", decay=HOUR, of=None, **clocks):
        of = table if of is None else of
        made.append(HostStrikes(of, host, name, ServerClock(of, f"{name}-{len(made)}", **clocks), decay=decay))
        return made[-1]

    yield make
    for strikes in made:
        strikes.close()


def rows(table):
    return list(table.query(STRIKE_PREFIX))


def test_a_host_without_strikes_costs_one_query_and_no_write(table, node):
    assert node("a").mine() == 0
    assert list(table.query("")) == []


def test_a_strike_is_seen_by_every_node(table, node):
    survivor, struck = node("a"), node("b")
    assert struck.mine() == 0
    survivor.strike("b", "went silent", "round.000003")
    until(lambda: rows(table))
    assert struck.mine() == 0, "what was known is not read again"
    assert struck.mine(fresh=True) == 1
    assert struck.mine() == 1
    assert survivor.live("b") == 1
    assert survivor.live("a") == 0
    (row,) = rows(table)
    assert row.value == {"host": "b", "reason": "went silent", "by": "node"}


def test_one_incident_is_one_strike_by_whichever_node_it_is_reported(table, node):
    reporters = [node(f"host-{index}") for index in range(4)]
    for reporter in reporters:
        reporter.strike("b", "lost its connection", "round.000003")
        reporter.strike("b", "lost its connection", "round.000003")
    for reporter in reporters:
        reporter.close()
    assert node("b").mine() == 1
    node("a").strike("b", "again", "round.000004")
    until(lambda: node("b").mine() == 2)


def test_a_hosts_own_strike_counts_at_once_and_once(table, node):
    mine = node("b")
    mine.strike("b", "a worker ended with SIGSEGV", "round.000001")
    assert mine.mine() == 1
    until(lambda: rows(table))
    assert mine.mine(fresh=True) == 1


def test_hosts_whose_names_begin_alike_are_apart(table, node):
    node("x").strike("node-1.b", "went silent", "round.000001")
    until(lambda: rows(table))
    assert node("node-1").mine() == 0
    assert node("node-1.b").mine() == 1


def test_strikes_decay_by_the_servers_clock_alone(table, node):
    # The wall clock and the monotonic clock of the reader are days off; only the server's times count.
    ahead = 86_400 * 9.0
    wrong = {"wall": lambda: time.time() - 86_400 * 7, "monotonic": lambda: time.monotonic() + ahead}
    node("a").strike("b", "went silent", "round.000001")
    until(lambda: rows(table))
    reader = node("b", **wrong)
    assert reader.mine() == 1
    ahead += 3600
    assert reader.mine() == 0
    time.sleep(0.2)  # the decay itself
    assert node("b", decay=MOMENT, **wrong).mine() == 0, "one that starts now reads the same"
    assert node("b", decay=HOUR).mine() == 1


class Aged:
    """A table whose first strike is an hour older than it is."""

    def __init__(self, table):
        self._table = table

    def __getattr__(self, name):
        return getattr(self._table, name)

    def query(self, prefix):
        for row in self._table.query(prefix):
            old = row.value.get("reason") == "first"
            yield replace(row, timestamp=row.timestamp - timedelta(hours=1)) if old else row


def test_a_strike_removes_what_has_expired(table, node):
    reporter = node("a", of=Aged(table))
    node("a").strike("b", "first", "round.000001")
    until(lambda: rows(table))
    reporter.strike("b", "second", "round.000002")
    until(lambda: [row.value["reason"] for row in rows(table)] == ["second"])


def test_a_hosts_rows_are_bounded(table, node):
    reporter = node("a")
    for number in range(20):
        reporter.strike("b", "again", f"round.{number:06d}")
    newest = [f"{STRIKE_PREFIX}b.round.{number:06d}" for number in range(4, 20)]
    until(lambda: sorted(row.key for row in rows(table)) == newest)
    assert reporter.live("b") == 16


def test_a_table_that_is_away_holds_nobody_up_and_loses_nothing(table, node):
    away = Away(table)
    strikes = node("b", of=away)
    started = time.monotonic()
    strikes.strike("b", "a worker ended with SIGBUS", "round.000001")
    strikes.strike("c", "went silent", "round.000001")
    assert time.monotonic() - started < 30
    assert strikes.mine() == 1, "its own strike is known without a table"
    assert strikes.live("c") == 0
    assert strikes.live("c") == 0
    away.here.set()
    until(lambda: {row.value["host"] for row in rows(table)} == {"b", "c"})
    assert strikes.mine(fresh=True) == strikes.live("c") == 1


def test_strikes_that_wait_for_a_table_are_bounded_and_dropped_at_the_end(table, node):
    away = Away(table)
    strikes = node("b", of=away)
    for number in range(200):
        strikes.strike("c", "went silent", f"round.{number:06d}")
    started = time.monotonic()
    strikes.close()
    assert time.monotonic() - started < 30
    strikes.close()


def test_what_a_table_refuses_is_no_error(table, node, caplog):
    strikes = node("b")
    strikes.strike("c" * 300, "a key that no table takes", "round.000001")
    assert strikes.live("c" * 300) == 0
    strikes.strike("d", "fine", "round.000001")
    until(lambda: node("e").live("d") == 1)


# --- the server's time


def test_the_servers_time_is_read_between_two_looks(table):
    reading = ServerClock(table, "a").reading()
    assert reading.before <= reading.after
    assert abs(reading.skew) < 1
    (row,) = table.query(CLOCK_PREFIX)
    assert row.timestamp == reading.server


@pytest.mark.parametrize("off", [-3600.0, -70.0, 70.0, 3600.0])
def test_a_clock_that_is_off_is_off_by_what_it_says(table, off):
    reading = ServerClock(table, "a", wall=lambda: time.time() + off).reading()
    assert abs(reading.skew - off) <= reading.after - reading.before + 0.01


@given(
    before=st.floats(0, 2e9),
    took=st.floats(0, 100),
    at=st.floats(0, 1),
    off=st.floats(-1e6, 1e6),
)
def test_the_skew_never_exceeds_the_difference_that_there_is(before, took, at, off):
    from datetime import datetime, timezone

    when = datetime.fromtimestamp(1e9, timezone.utc) + timedelta(seconds=before / 1e3)
    real = when.timestamp() + off - at * took  # this machine's clock, ahead by ``off``, when the call began
    skew = Reading(real, when, real + took, 0.0).skew
    assert abs(skew) <= abs(off) + 1e-3
    assert abs(off - skew) <= took + 1e-3


def test_the_time_is_read_once_and_counted_on_from_there(table):
    steps = iter([100.0, 107.0])
    clock = ServerClock(table, "a", monotonic=lambda: next(steps))
    first = clock.reading()
    etag = table.get(f"{CLOCK_PREFIX}a").etag
    assert clock.now() == first.server + timedelta(seconds=7)
    assert table.get(f"{CLOCK_PREFIX}a").etag == etag


def test_an_earlier_agents_row_is_replaced(table):
    first = ServerClock(table, "a").reading()
    assert ServerClock(table, "a").reading().server > first.server


def test_two_nodes_of_one_name_are_reported(tmp_path):
    class Contended:
        """Every row that is read has just been written by another node."""

        def __init__(self):
            self.table = open_table(
                TableRendezvous(endpoint=str(tmp_path / "t.sqlite")), "run", NodeEnvironment.read({})
            )

        def __getattr__(self, name):
            return getattr(self.table, name)

        def get(self, key):
            row = self.table.get(key)
            self.table.replace(key, {"other": True}, row.etag)
            return self.table.get(key)

    contended = Contended()
    with pytest.raises(RowChanged, match="share a name"):
        ServerClock(contended, "a").reading()
    contended.table.close()


# --- fault attribution


@pytest.mark.parametrize(
    ("code", "message", "said"),
    [
        (139, "", "SIGSEGV"),
        (-11, "", "SIGSEGV"),
        (135, "", "SIGBUS"),
        (-7, "", "SIGBUS"),
        (137, "", None),
        (-9, "Killed", None),
        (134, "Aborted", None),
        (1, "ValueError: wrong", None),
        (0, "", None),
        (1, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", None),
        (1, "RuntimeError: CUDA error: device-side assert triggered", None),
        (1, "RuntimeError: CUDA error: an illegal memory access was encountered", "illegal memory access"),
        (
            1,
            "Traceback\n  x\nRuntimeError: CUDA error: uncorrectable ECC error encountered\ny",
            "failed: Runtime",
        ),
        (1, "watchdog timed out; CUDA error: uncorrectable ECC error encountered", "ECC"),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling", "CUBLAS"),
        (1, "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "CUDNN"),
        (1, "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 719", "ncclUnhandled"),
        (1, "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 'out of memory'", None),
        (
            1,
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exited",
            None,
        ),
        (1, "RuntimeError: [gloo] Connection closed by peer [10.0.0.4]:2222", None),
        (1, "xid = lookup(gpu)", None),
    ],
)
def test_what_strikes_a_host_and_what_does_not(code, message, said):
    reason = worker_fault(code, message)
    assert (reason is None) if said is None else (said in reason)


def sealed(count):
    members = tuple(Member(f"n{index}", "i", round=7, host_id=f"h{index}") for index in range(count))
    return Round(7, "sealed", members)


@pytest.mark.parametrize(
    ("count", "lost", "leaving", "hosts"),
    [
        (4, ["n1"], [], ["h1"]),
        (4, ["n1", "n2"], [], ["h1", "h2"]),
        (4, ["n1", "n2", "n3"], [], []),
        (4, ["n1"], ["n1"], []),
        (4, ["n1", "n2"], ["n1"], ["h2"]),
        (2, ["n0"], [], ["h0"]),
        (2, ["n0", "n1"], [], []),
        (3, ["stranger"], [], []),
        (1, ["n0"], [], []),
    ],
)
def test_a_lost_minority_gets_strikes_but_not_a_majority(count, lost, leaving, hosts):
    assert [member.host_id for member in faulty_members(sealed(count), lost, leaving)] == hosts
    assert incident_id(sealed(count)) == "round.000007"


def test_a_machine_is_its_address_and_its_boot(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("0f3b2a11-0000\n")
    second.write_text("99aa88bb-0000\n")
    assert host_id("node-1", "10.0.0.4", first) == host_id("node-2", "10.0.0.4", first) == "10.0.0.4-0f3b2a11"
    assert host_id("node-1", "10.0.0.4", second) != host_id("node-1", "10.0.0.4", first)
    assert host_id("node-1", "10.0.0.4", tmp_path / "missing") == "10.0.0.4"
    assert {host_id("node-1", host, first) for host in ("127.0.0.1", "127.0.1.1", "localhost", "::1")} == {"node-1"}
