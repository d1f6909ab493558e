"""Nodes of one run, with real sockets and in simulated time, for all tests of this folder."""

from __future__ import annotations

import pytest

from azureml_elastic.node.core.round import Limits
from tests.support.rendezvous.nodes import Nodes
from tests.support.rendezvous.simulation import Cluster


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path / "table.sqlite")
    yield made
    made.close()


@pytest.fixture
def cluster():
    """Return a function that makes simulated nodes, ``node-00`` and so on, as many as are wanted."""
    made = []

    def make(count: int = 0, minimum: int = 1, maximum: int = 0, **settings) -> Cluster:
        nodes = Cluster(**settings)
        made.append(nodes)
        for number in range(count):
            nodes.add(f"node-{number:02d}", Limits(minimum, maximum or count))
        return nodes

    yield make
    for each in made:
        each.close()
