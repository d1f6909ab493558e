"""What agents have sent to each other waits for its round."""

from __future__ import annotations

from azureml_elastic.ipc.agent_messages import Leaving
from azureml_elastic.node.core.events import FromMember
from azureml_elastic.node.rendezvous.context import Inbox


def test_messages_of_earlier_rounds_are_dropped_and_those_of_later_ones_stay():
    inbox = Inbox()
    for number in (1, 3, 2, 2):
        inbox.put(number, FromMember(f"of {number}", Leaving()))
    assert inbox.take(2) == 2 * [FromMember("of 2", Leaving())]
    assert inbox.take(2) == []
    assert inbox.take(3) == [FromMember("of 3", Leaving())]
