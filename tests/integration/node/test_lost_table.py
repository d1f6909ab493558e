"""Real nodes whose table is deleted, cleaned, or gets another key in the middle of a run."""

from __future__ import annotations

import secrets
import time
import uuid

import pytest
from azure.data.tables import TableServiceClient

from azureml_elastic.ipc import KEY_BYTES
from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.rendezvous.row_keys import ALL_PREFIX, ROUND_KEY, RUN_KEY
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer
from tests.support.rendezvous.nodes import TIMEOUT, Nodes
from tests.support.waiting import until


class Lost:
    """Nodes whose table can be lost."""

    def __init__(self, nodes, delete):
        self.nodes = nodes
        self._delete = delete

    def run(self, count):
        """Have nodes in one round, and return them."""
        group = [self.nodes.make(f"node-{k}", 1, 4) for k in range(count)]
        for node in group:
            node.announce()
        self.nodes.join(*group)
        return group

    def lose(self):
        self._delete()


@pytest.fixture(params=["sqlite", "azurite"])
def lost(request, tmp_path):
    if request.param == "sqlite":
        nodes = Nodes(tmp_path / "table.sqlite")

        def delete():
            for row in [*nodes.table.query(ALL_PREFIX), nodes.table.get("heartbeat")]:
                nodes.table.delete(row.key)
    else:
        azurite = request.getfixturevalue("azurite")
        name = f"t{uuid.uuid4().hex}"
        nodes = Nodes(azurite.endpoint, name)

        def delete():
            with TableServiceClient.from_connection_string(azurite.connection_string) as service:
                service.delete_table(name)

    yield Lost(nodes, delete)
    nodes.close()


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path / "table.sqlite")
    yield made
    made.close()


def round_of(nodes):
    row = nodes.table.get(ROUND_KEY)
    return Round.from_value(row.value) if row is not None else Round()


def test_survivors_of_a_lost_table_form_a_higher_round_with_few_calls(lost):
    group = lost.run(3)
    key = lost.nodes.table.get(RUN_KEY).value
    calls, began = sum(lost.nodes.table.calls.values()), time.monotonic()
    lost.lose()
    lost.nodes.kill(group[0])
    assignments = lost.nodes.rejoin(*group[1:])
    seconds = time.monotonic() - began
    assert {assignment.round.number for assignment in assignments} == {2}
    assert [member.node for member in assignments[0].round.members] == ["node-1", "node-2"]
    assert lost.nodes.table.get(RUN_KEY).value == key
    assert sum(lost.nodes.table.calls.values()) - calls <= 40 + 10 * seconds


def test_rank_0_notices_a_lost_table_and_a_new_node_joins(lost):
    group = lost.run(2)
    lost.lose()
    lost.nodes.rejoin(*group)
    assert round_of(lost.nodes).number >= 2
    (pending,) = lost.nodes.start(lost.nodes.make("node-9", 1, 4))
    until(lambda: group[0].status().waiting or group[0].status().broken)
    if not group[0].status().broken:
        group[0].round_end.write(Reopen("joining"))
    lost.nodes.rejoin(*group)
    assert len(pending.result(TIMEOUT).round.members) == 3


class LosesRowsBeforeTheHeartbeat:
    """A table that loses all its rows just before the heartbeat is inserted for the first time."""

    def __init__(self, table):
        self._table = table
        self._has_lost = False

    def insert(self, key, value):
        if key == TABLE_HEARTBEAT_KEY and not self._has_lost:
            self._has_lost = True
            for row in self._table.query(ALL_PREFIX):
                self._table.delete(row.key)
        return self._table.insert(key, value)

    def __getattr__(self, name):
        return getattr(self._table, name)


def test_rows_that_are_lost_before_the_first_heartbeat_are_noticed_by_it(nodes):
    (node,) = [nodes.make("node-0", table=LosesRowsBeforeTheHeartbeat(nodes.table))]
    nodes.join(node)
    (assignment,) = nodes.rejoin(node)
    assert assignment.round.number == 2
    assert round_of(nodes).number == 2


def test_a_node_whose_handshake_is_refused_reads_the_key_again(nodes):
    """A new node made another key while the row was gone; the members still hold the old one."""
    group = [nodes.make(f"node-{k}", 1, 4) for k in range(2)]
    for node in group:
        node.announce()
    nodes.join(*group)
    nodes.table.delete(RUN_KEY)
    nodes.table.insert(RUN_KEY, {"key": secrets.token_hex(KEY_BYTES)})
    calls, began = sum(nodes.table.calls.values()), time.monotonic()
    (pending,) = nodes.start(nodes.make("node-9", 1, 4))
    until(lambda: group[0].status().waiting or group[0].status().broken)
    assert sum(nodes.table.calls.values()) - calls <= 40 + 20 * (time.monotonic() - began)
    if not group[0].status().broken:
        group[0].round_end.write(Reopen("joining"))
    nodes.rejoin(*group)
    assert len(pending.result(TIMEOUT).round.members) == 3
    assert {node._context.authenticator.key.hex() for node in nodes.made} == {nodes.table.get(RUN_KEY).value["key"]}


@pytest.mark.parametrize("older", [False, True])
def test_the_pointer_to_the_newest_checkpoint_is_put_back(nodes, older):
    first = CheckpointPointer(nodes.table, 1, "i")
    first.commit({"step": 1})
    row = nodes.table.get("checkpoint")
    pointer = CheckpointPointer(nodes.table, 2, "i")
    pointer.take_over()
    pointer.commit({"step": 2})
    nodes.table.delete("checkpoint")
    if older:
        nodes.table.insert("checkpoint", row.value)
    pointer._etag = None  # as after a write whose answer was lost
    assert pointer.take_over() == {"step": 2}
    assert nodes.table.get("checkpoint").value["pointer"] == {"step": 2}
    assert nodes.table.get("checkpoint").value["round"] == 2
