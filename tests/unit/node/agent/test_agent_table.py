"""The table as the agent's thread uses it: notices end calls that hang, and nothing else changes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from azureml_elastic.errors import NodeLeaving, RowChanged, RowExists
from azureml_elastic.node.agent.agent_table import AgentTable


class Held:
    """A table whose calls do not answer until they may."""

    def __init__(self, table):
        self._table = table
        self.answers = threading.Event()

    def get(self, key):
        assert self.answers.wait(60)
        return self._table.get(key)


class Notices:
    """A watch that has noticed something, and that can be asked whether the node has said so."""

    noticed = True
    committed = False

    def commit_to_leave(self):
        self.committed = True
        return True


def test_calls_and_their_errors_are_those_of_the_table(table):
    here = AgentTable(table, Notices())
    etag = here.insert("a", {"x": 1})
    with pytest.raises(RowExists):
        here.insert("a", {})
    newer = here.replace("a", {"x": 2}, etag)
    with pytest.raises(RowChanged):
        here.delete("a", etag)
    assert [(row.key, row.value) for row in here.query("")] == [("a", {"x": 2})]
    assert here.get("a").etag == newer
    here.delete("a")
    assert here.get("a") is None


def test_a_node_that_leaves_gives_up_on_a_call_that_hangs(table):
    held, notices = Held(table), Notices()
    with pytest.raises(NodeLeaving):
        AgentTable(held, notices).get("a")
    assert notices.committed, "a notice that was withdrawn now would come too late"
    held.answers.set()


def test_what_other_threads_call_is_waited_for(table):
    held, notices = Held(table), Notices()
    here = AgentTable(held, notices)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(here.get, "a")
        with pytest.raises(NodeLeaving):  # by now the other one would have been given up, too
            here.get("a")
        assert not answer.done()
        held.answers.set()
        assert answer.result(60) is None
