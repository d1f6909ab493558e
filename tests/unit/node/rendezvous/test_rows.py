"""A node's own writes when answers are lost, and how many nodes fit into one round."""

from __future__ import annotations

import itertools
import json
import socket
import time
from dataclasses import replace

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import RunFailed, TableForbidden, TableNotFound, TableUnavailable, ValueTooLarge
from azureml_elastic.ipc import Authenticator, Peer
from azureml_elastic.ipc.connection import MAX_LINE, encode
from azureml_elastic.node.core.joining import is_landmark
from azureml_elastic.node.core.messages import CODEC, RoundChanged, unpack
from azureml_elastic.node.core.round import Limits, Member, NewestRound, Round, reopened
from azureml_elastic.node.rendezvous.context import LocalNode
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.row_keys import LANDMARK_PREFIX, ROUND_KEY, member_key, node_of
from azureml_elastic.node.rendezvous.rows import Rows, RunKey
from azureml_elastic.node.table.sqlite import SqliteTable
from azureml_elastic.node.table.values import write_value


class Forgetful:
    """A real table that loses the answers to the next writes, or the writes themselves.

    Args:
        table: the real one.
    """

    def __init__(self, table):
        self._table = table
        self.plan: list[str] = []
        self.tried = 0
        self.get, self.query, self.delete, self.close = table.get, table.query, table.delete, table.close

    def insert(self, *what):
        return self._write(self._table.insert, *what)

    def replace(self, *what):
        return self._write(self._table.replace, *what)

    def _write(self, call, *what):
        self.tried += 1
        way = self.plan.pop(0) if self.plan else ""
        answer = call(*what) if way != "never sent" else None
        if way:
            raise TableUnavailable(way)
        return answer


@pytest.fixture
def table(tmp_path):
    forgetful = Forgetful(SqliteTable(tmp_path / "table.sqlite", "table", "run"))
    yield forgetful
    forgetful.close()


@pytest.fixture
def pauses():
    return []


def make_rows(table, pause):
    return Rows(table, pause, NewestRound(), RunKey(table, time.monotonic, Authenticator(Peer("a", "i-a"), "hub")))


@pytest.fixture
def rows(table, pauses):
    return make_rows(table, pauses.append)


WAYS = (["never sent"], ["lost"], ["never sent", "lost"], ["never sent", "never sent", "lost"])


@pytest.mark.parametrize("plan", WAYS, ids=", ".join)
def test_a_write_whose_answer_was_lost_is_recognised(table, rows, pauses, plan):
    rows.write_member(Member("node", "i", state="starting"))
    version = table.get(member_key("node")).etag
    table.plan, table.tried = list(plan), 0
    rows.write_member(Member("node", "i", round=1))
    after = table.get(member_key("node"))
    assert after.value["state"] == "waiting"
    assert int(after.etag) == int(version) + 1  # written once
    assert table.tried == len(plan) + 1
    assert sum(pauses) == pytest.approx(0.2 * (2 ** len(plan) - 1))
    rows.write_member(Member("node", "i", round=2))  # the version is known
    assert table.tried == len(plan) + 2


@pytest.mark.parametrize("plan", WAYS, ids=", ".join)
def test_a_seal_whose_answer_was_lost_is_ones_own(table, rows, plan):
    rows.read_round()
    table.plan = list(plan)
    assert rows.replace_round(Round(state="sealed"))
    table.plan = list(plan)
    assert rows.end_round(1, Round(2))
    assert Round.from_value(table.get(ROUND_KEY).value) == Round(2)
    assert rows._latest.after(Round()) == Round(2)


def test_who_has_sealed_a_round_ends_it_with_one_call(table, rows):
    rows.read_round()
    assert rows.replace_round(Round(state="sealed"))
    calls = []
    get = table.get
    table.get = lambda key: calls.append(key) or get(key)
    assert rows.end_round(1, Round(2))
    assert not calls
    assert rows.has_written(Round(2))
    other = make_rows(table, lambda _: None)
    assert other.read_round() == Round(2)
    assert not other.has_written(Round(2))
    assert other.replace_round(Round(2, "sealed"))
    assert not rows.replace_round(Round(2, "sealed"))
    rows.read_round()
    assert not rows.has_written(Round(2, "sealed"))


def test_a_round_that_another_node_has_ended_is_not_ended_again(table, rows):
    rows.read_round()
    assert rows.replace_round(Round(state="sealed"))
    other = make_rows(table, lambda _: None)
    other.read_round()
    assert other.end_round(1, Round(2, reason="other"))
    assert not rows.end_round(1, Round(2))
    assert rows.read_round() == Round(2, reason="other")


def test_an_equal_write_of_another_node_is_not_taken_for_ones_own(table, rows):
    other = make_rows(table, lambda _: None)
    rows.read_round()
    other.read_round()
    assert other.replace_round(Round(state="sealed"))
    table.plan = ["never sent"]
    assert not rows.replace_round(Round(state="sealed"))


def test_a_write_that_was_overtaken_counts_as_lost(table, rows):
    """It was carried out, but the row has changed since, which is for another node to act on."""
    rows.read_round()
    rows.replace_round(Round(state="sealed"))
    other = make_rows(table, lambda _: None)

    def seal(_):
        other.read_round()
        assert other.replace_round(Round(2, "sealed"))

    rows._pause = seal
    table.plan = ["lost"]
    assert not rows.end_round(1, Round(2))
    assert rows.read_round() == Round(2, "sealed")


@pytest.mark.parametrize("refusal", [TableForbidden, TableNotFound])
def test_a_node_that_was_in_a_round_waits_for_a_table_that_refuses_it(table, rows, pauses, refusal):
    rows.read_round()
    rows.replace_round(Round(state="sealed"))
    get, refusals = table.get, [refusal("the role was removed")] * 3

    def refuse(key):
        if refusals:
            raise refusals.pop()
        return get(key)

    table.get = refuse
    with pytest.raises(refusal):
        rows.read_round()
    rows.persistent = True
    assert rows.read_round() == Round(state="sealed")
    assert sum(pauses) == pytest.approx(0.2 + 0.4)


NAMES = [f"node-{number}" for number in range(300)]
LANDMARK = next(name for name in NAMES if is_landmark(name))


def test_about_one_node_in_thirty_is_a_landmark():
    assert 4 <= sum(map(is_landmark, NAMES)) <= 16
    for name in NAMES:
        assert node_of(member_key(name)) == name
        assert member_key(name).startswith(LANDMARK_PREFIX) == is_landmark(name)
    assert node_of(ROUND_KEY) is None


def test_one_query_reads_the_round_and_all_nodes_and_a_shorter_one_some(table, rows):
    others = [name for name in NAMES if not is_landmark(name)]
    assert rows.read_some("node") == (Round(), {})
    rows.replace_round(Round(3, reason="a test"))
    for name in others[:40]:
        table.insert(member_key(name), Member(name, "i").to_value())
    table.insert("round-trip", {"of": "another part"})
    table.insert("member.b", {"of": "another part"})
    round_, roster = rows.read_some(others[0])
    assert round_ == Round(3, reason="a test")
    assert {node: Member.from_value(value) for node, value in roster.items()} == {
        name: Member(name, "i") for name in others[:40]
    }
    table.insert(member_key(LANDMARK), Member(LANDMARK, "i").to_value())
    assert list(rows.read_some(others[0])[1]) == [LANDMARK]
    assert len(rows.read_some(LANDMARK)[1]) == 41  # it sees no other one
    assert len(rows.read_all()[1]) == 41
    assert rows.replace_round(Round(3, "sealed"))  # its version was read, too
    assert list(rows.read_some(others[0])[1]) == [LANDMARK]


def test_the_order_of_a_rows_versions():
    moves = [Round(), Round(1, "sealed"), Round(2), Round(2, "sealed"), Round(2, "failed")]
    for earlier, later in itertools.pairwise(moves):
        assert later.is_newer_than(earlier)
        assert not earlier.is_newer_than(later)
        assert not later.is_newer_than(later)
    assert Round().is_newer_than(None)


# --- sizes -----------------------------------------------------------------------------------------------------------


def large(count: int, name: int) -> Round:
    """Return a sealed round that holds as much as it can: each node has survived, and was expected."""
    members = [
        Member(
            node=f"{number:0{name}}",
            incarnation=f"{number:012x}",
            round=12345,
            host="2001:db8:1234:5678:9abc:def0:1234:5678",
            store_port=65535,
            hub_port=65535,
            slots=16,
            host_id=f"{number:036}",
            strikes=1,
        )
        for number in range(count)
    ]
    sealed = replace(Round(12344, "sealed", tuple(members)))
    return replace(reopened(sealed, "x" * 200), state="sealed", members=sealed.members)


@pytest.mark.parametrize(("name", "most"), [(12, 1620), (30, 1360), (63, 1050)])
def test_how_many_nodes_fit_into_one_row(name, most):
    """The limit of the table is 900 KiB of UTF-16; ``docs/internals/rendezvous.md`` names these numbers."""
    write_value(ROUND_KEY, large(most, name).to_value())
    with pytest.raises(ValueTooLarge):
        write_value(ROUND_KEY, large(most + 20, name).to_value())


def test_a_thousand_nodes_fit_into_one_row_and_one_message():
    round_ = large(1000, 60)
    assert Round.from_value(json.loads(write_value(ROUND_KEY, round_.to_value()))) == round_
    line = encode(CODEC.encode(RoundChanged(round_)))
    assert len(line) < MAX_LINE / 10
    assert CODEC.decode(json.loads(line)) == RoundChanged(round_)


@pytest.mark.parametrize("text", ["", "no base64!", "bm8gemxpYg==", "eJwDAAAAAAE="])
def test_what_is_no_packed_round_is_refused(text):
    with pytest.raises(ValueError, match="no packed round"):
        unpack(text)


def test_too_many_nodes_fail_the_run_for_everyone_with_the_limit(table):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        where = {"round": 1, "host": "127.0.0.1", "hub_port": hub.getsockname()[1], "host_id": "h" * 5000}
        for number in range(100):
            member = Member(f"{number:063}", f"{number:012x}", **where)
            table.insert(member_key(member.node), member.to_value())
        node = Rendezvous(table, LocalNode("0", "127.0.0.1"), Limits(1, 3000), RendezvousTimings())
        with pytest.raises(RunFailed, match=r"A round of 10\d nodes .* at most 921,600.* Lower max_instance_count"):
            node.join()
        node.shutdown()
