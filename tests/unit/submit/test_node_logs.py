"""The node of rank 0 is known from the logs of the nodes' agents."""

import pytest

from azureml_elastic.submit.node_logs import leading_node


@pytest.mark.parametrize(
    ("logs", "node"),
    [
        ({}, None),
        ({"a": "", "b": "Round 1: rank 1 of 2 nodes, 2 workers."}, None),
        ({"a": "x\nRound 1: rank 0 of 2 nodes, 2 workers.\n", "b": "Round 1: rank 1 of 2 nodes, 2 workers."}, "a"),
        (
            {
                "a": "Round 1: rank 0 of 2 nodes",
                "b": "Round 9: rank 1 of 2 nodes\nRound 10: rank 0 of 1 node",
            },
            "b",
        ),
        ({"a": "Round 2: rank 0 of 2 nodes\nRound 3: rank 1 of 2 nodes", "b": "Round 3: rank 10 of 12 nodes"}, "a"),
    ],
)
def test_the_node_of_rank_0_in_the_last_round_leads(logs, node):
    assert leading_node(logs) == node
