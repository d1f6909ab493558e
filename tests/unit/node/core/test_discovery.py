"""How long the workers of a round may look for each other: not before they are all there, and no second time."""

from __future__ import annotations

import pytest

from azureml_elastic.ipc.agent_messages import AllPlaced, Placed
from azureml_elastic.node.core.actions import FindPair, ToLeader, ToMembers
from azureml_elastic.node.core.hangs import PeerDiscovery

NODES = ("node-0", "node-1", "node-2")


class Agents:
    """The agents of a round; what they say arrives at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.all = {node: PeerDiscovery(NODES) for node in NODES}

    def place(self, node: str) -> None:
        assert self.all[node].look(self.now, placed=True, connected=False) == [ToLeader(Placed())]
        for action in self.all[NODES[0]].reported(node):
            assert action == ToMembers(AllPlaced())
            for agent in self.all.values():
                agent.all_placed(self.now)

    def late(self, *connected: str) -> set[str]:
        looks = {
            node: agent.look(self.now, placed=False, connected=node in connected) for node, agent in self.all.items()
        }
        return {node for node, actions in looks.items() if actions == [FindPair()]}


@pytest.fixture
def agents():
    return Agents()


def test_time_counts_from_when_the_workers_of_all_nodes_are_there(agents):
    agents.place("node-2")
    agents.place("node-0")
    agents.now += 3600.0
    assert agents.late() == set(), "node-1 imports for an hour"
    agents.place("node-1")
    agents.now += 9.9
    assert agents.late() == set()
    agents.now += 0.1
    assert agents.late() == set(NODES)
    assert agents.late("node-1") == {"node-0", "node-2"}


def test_it_is_reported_once_and_only_when_it_is_so(agents):
    agent = agents.all["node-1"]
    assert agent.look(agents.now, placed=False, connected=False) == []
    agents.place("node-1")
    assert agent.look(agents.now, placed=True, connected=False) == []
    assert agents.all["node-0"].reported("node-1") == []
    assert agents.all["node-0"].reported("a node of another round") == []
    agents.place("node-0")
    agents.now += 60.0
    assert agents.late() == set()
