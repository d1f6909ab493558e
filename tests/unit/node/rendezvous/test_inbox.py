"""What agents have sent to each other waits for its round."""

from __future__ import annotations

from azureml_elastic.ipc.agent_messages import Leaving
from azureml_elastic.node.rendezvous.inbox import FromMember, Inbox


def test_events_of_earlier_rounds_are_dropped_and_those_of_later_ones_stay():
    inbox = Inbox()
    events = [FromMember(number, "node-0", Leaving()) for number in (1, 3, 2, 2)]
    for event in events:
        inbox.put(event)
    assert inbox.take(2) == events[2:]
    assert inbox.take(2) == []
    assert inbox.take(3) == [events[1]]
