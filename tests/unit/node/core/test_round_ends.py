"""What a node writes to end a round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_elastic.node.core.actions import Close, Reopen
from azureml_elastic.node.core.failures import FailureRecord
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.round_ends import EndFacts, left_in_order, version_after

ROUND = Round(3, "sealed", members=tuple(Member(node, f"i-{node}") for node in "abc"), seconds=5.0, failed_rounds=1)
FACTS = EndFacts(seconds=2.0, waiting=frozenset({"y", "x"}), absent=frozenset({"c"}), why_absent="c is silent")


def after(how, facts=FACTS, limit=20):
    return version_after(ROUND, how, facts, max_failed_rounds=limit, advice="Open the ports.")


@pytest.mark.parametrize(
    ("lost", "failed"),
    [({"c"}, 2), ({"b", "c"}, 0)],
    ids=["nobody has connected of those that are lost", "one had connected"],
)
def test_a_round_fails_by_the_network_where_no_lost_member_had_connected(lost, failed):
    to = after(Reopen("lost some", lost=frozenset(lost)))
    assert (to.number, to.state, to.failed_rounds, to.reason) == (4, "open", failed, "lost some: c is silent")
    assert to.previous == tuple(node for node in "abc" if node not in lost)
    assert to.expected == (*to.previous, "x", "y")
    assert to.seconds == 7.0


def test_a_workers_failure_explains_the_end_although_a_member_is_absent():
    record = FailureRecord("a worker's", "user", 7, "b", 1, exit_code=1)
    to = after(Reopen("a worker failed", lost=frozenset({"c"}), failures=(record,)))
    assert (to.reason, to.failed_rounds, to.failures) == ("a worker failed", 0, (record,))


def test_too_many_failed_rounds_end_the_run():
    to = after(Reopen("they cannot connect", round_failed=True), replace(FACTS, absent=frozenset()), limit=2)
    assert (to.number, to.state, to.exit_code) == (3, "failed", 1)
    assert to.message.startswith("2 rounds in a row broke because nodes could not reach each other, the last one")
    assert to.message.endswith("because they cannot connect. Open the ports.")


@pytest.mark.parametrize("succeeded", [True, False])
def test_the_end_of_the_run_keeps_the_round(succeeded):
    to = after(Close(succeeded, "x" * 40_000, exit_code=0 if succeeded else 9))
    assert (to.number, to.members, len(to.message)) == (3, ROUND.members, 30_000)
    assert (to.state, to.exit_code) == (("succeeded", 0) if succeeded else ("failed", 9))


def test_who_cannot_reach_rank_0_has_not_left_in_order():
    rows = [Member("a", "i", state="left"), Member("b", "i", state="left", unreached=("c",)), Member("c", "i")]
    assert left_in_order(rows) == {"a"}
