"""The node of rank 0 is known from the logs of the nodes' agents."""

import pytest

from azureml_elastic.submit.run import GrowingLog, joined, leading_node


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


def test_what_is_added_to_a_log_comes_in_whole_lines():
    log = GrowingLog()
    assert log.added({}, last=False) == ""
    assert log.added({"std_log.txt": "one\ntw"}, last=False) == "one\n"
    assert log.added({"std_log.txt": "one\ntwo"}, last=False) == ""
    assert log.added({"std_log.txt": "one\ntwo\nthree"}, last=False) == "two\n"
    assert log.added({"std_log.txt": "one\ntwo\nthree"}, last=True) == "three"


def test_several_files_are_under_their_names():
    assert joined({"a": "x\n", "b": "y\n"}) == "==> a <==\nx\n\n==> b <==\ny\n"
    log = GrowingLog()
    assert log.added({"a": "x\n", "b": ""}, last=False) == "==> a <==\nx\n"
    assert log.added({"a": "x\n", "b": "y\n"}, last=True) == "==> b <==\ny\n"
