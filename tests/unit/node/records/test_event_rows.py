"""Readers of the events in a run's table."""

from azureml_elastic.ledger.events import NodeLeft, NodeStarted, Progress, RoundEntered
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.records.observation import EventRowReader, read_event_rows
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY


def write(table, number, event):
    table.insert(f"event.{event.round:06d}.{event.node}.i.{number:06d}", event.model_dump(mode="json"))


def entered(time, number):
    return RoundEntered(time=time, node="a", round=number, rank=0, members=("a",), world_size=1)


def test_events_are_returned_once_and_in_order_while_rounds_follow(table):
    reader = EventRowReader(table)
    assert reader.read() == []
    started = NodeStarted(time=1, node="a", host="h", pid=1)
    write(table, 0, started)
    assert reader.read() == [started]
    table.insert(ROUND_KEY, Round(1, "sealed", (Member("a", "i", round=1),)).to_value())
    write(table, 1, entered(2, 1))
    assert reader.read() == [entered(2, 1)]
    assert reader.read() == []
    row = table.get(ROUND_KEY)
    table.replace(ROUND_KEY, Round(4, "sealed", (Member("a", "i", round=4),)).to_value(), row.etag)
    late = NodeLeft(time=3, node="b", round=1, reason="preempted", exit_code=0)  # written while round 2 formed
    for number, event in enumerate((entered(5, 3), entered(6, 4), entered(4, 2), late), start=2):
        write(table, number, event)
    assert reader.read() == [late, entered(4, 2), entered(5, 3), entered(6, 4)]


def test_the_step_of_the_heartbeat_is_an_event_of_rank_0s_node(table):
    reader = EventRowReader(table)
    table.insert(ROUND_KEY, Round(1, "sealed", (Member("a", "i", round=1),)).to_value())
    table.insert(TABLE_HEARTBEAT_KEY, {"round": 1, "beats": 1, "by": "i", "step": 7})
    (event,) = reader.read()
    assert isinstance(event, Progress)
    assert (event.node, event.round, event.step) == ("a", 1, 7)
    assert reader.read() == []


def test_rows_of_unknown_kinds_are_counted(table):
    write(table, 0, entered(1, 1))
    table.insert("event.000001.a.i.000009", {"kind": "of a later release", "time": 1, "node": "a"})
    assert read_event_rows(table) == ([entered(1, 1)], 1)
