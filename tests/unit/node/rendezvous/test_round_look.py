"""A member looks at the round's row while the table does not answer: it sees all else meanwhile."""

from __future__ import annotations

import threading

from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from tests.support.rendezvous.nodes import TIMEOUT
from tests.support.waiting import until


class Stuck:
    """A table whose reads of the round's row do not answer while it is held."""

    def __init__(self, table):
        self._table = table
        self.is_held = False
        self.asked = threading.Event()
        self.answers = threading.Event()

    def __getattr__(self, name):
        return getattr(self._table, name)

    def get(self, key):
        row = self._table.get(key)
        if self.is_held and key == ROUND_KEY:
            self.asked.set()
            assert self.answers.wait(TIMEOUT)
        return row


def is_asked(node, table):
    """Have the node look at the round's row; a request passes by a connection whose handshake is not complete yet."""
    node.hub.request_read()
    node.status()
    return table.asked.is_set()


def test_a_look_at_the_round_does_not_hold_up_the_agent(nodes):
    table = Stuck(nodes.table)
    node = nodes.make("a", maximum=1, table=table)
    (assignment,) = nodes.join(node)
    row = nodes.table.get(ROUND_KEY)
    nodes.table.replace(ROUND_KEY, {**row.value, "number": assignment.round.number + 1, "state": "open"}, row.etag)
    table.is_held = True
    until(lambda: is_asked(node, table))
    assert not node.status().over, "it has answered while the table does not"
    table.is_held = False
    table.answers.set()
    until(lambda: node.status().over)


def test_a_look_at_the_round_before_says_nothing_of_this_one(nodes):
    table = Stuck(nodes.table)
    node = nodes.make("a", maximum=1, table=table)
    nodes.join(node)
    table.is_held = True
    until(lambda: is_asked(node, table))
    table.is_held = False
    node.round_end.write(Reopen("another round"))
    (assignment,) = nodes.join(node)
    assert assignment.round.number == 2
    table.answers.set()  # with the row of round 1
    until(lambda: "look at the round" not in {thread.name for thread in threading.enumerate()})
    for _ in range(3):
        assert not node.status().over
