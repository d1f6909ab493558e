"""The restart policy: runs without progress end, and expired failures do not end a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan, RendezvousTimings, TableRendezvous
from azureml_elastic.config.exit_codes import AGENT_LOST, PREEMPTED, UNHEALTHY, of_failed_run
from azureml_elastic.node.core.failures import (
    MAX_RECORDS,
    FailureRecord,
    RestartDecision,
    aged,
    decide_restart,
    read_records,
)
from azureml_elastic.node.core.round import Member, Round, reopened
from azureml_elastic.node.core.round_ends import SUMMARIES, closing_message, size_with

HOUR = 3600.0
KINDS = sorted(SUMMARIES.keys() - {"nonfinite"})
"""The kinds after which a run may be restarted."""

CHARGED = [kind for kind in KINDS if kind != "peer"]


def terms(max_restarts: int = 3, max_failed_rounds: int = 5) -> Plan:
    return Plan(
        resources=ElasticResources(max_instance_count=1),
        distribution=ElasticDistribution(max_restarts=max_restarts),
        rendezvous=TableRendezvous(timings=RendezvousTimings(max_failed_rounds=max_failed_rounds)),
    )


def record(signature: str = "a", kind="user", step: int | None = 0, node: str = "node-0", **more) -> FailureRecord:
    return FailureRecord(signature, kind, step, node, rank=0, exit_code=1, **more)


class Run:
    """A run that fails again and again: the rows of its rounds, as the agents would write them."""

    def __init__(self, conditions: Plan):
        self.terms = conditions
        self.round = Round(state="sealed", members=(Member("node-0", "i"),))
        self.rounds = 1

    def fails(self, failure: FailureRecord, seconds: float = 1.0, *, conclusive: bool = False) -> RestartDecision:
        verdict = decide_restart(
            aged(self.round.failures, seconds),
            failure,
            self.terms.distribution,
            conclusive=conclusive,
            seconds=seconds,
            failed_rounds=self.round.failed_rounds,
            max_failed_rounds=self.terms.rendezvous.timings.max_failed_rounds,
        )
        if verdict.restart:
            after = reopened(
                self.round, "", failures=verdict.failures, seconds=seconds, round_failed=verdict.round_failed
            )
            self._seal(after)
        return verdict

    def goes_on(self, seconds: float) -> None:
        """A round ends for another reason: a node was lost, or one came."""
        self._seal(reopened(self.round, "", seconds=seconds))

    def _seal(self, after: Round) -> None:
        stored = Round.from_value(json.loads(json.dumps(after.to_value())))
        self.round = replace(stored, state="sealed", members=self.round.members)
        self.rounds += 1


records = st.builds(
    FailureRecord,
    signature=st.text(max_size=120),
    kind=st.sampled_from(KINDS),
    step=st.none() | st.integers(0, 50),
    node=st.text(max_size=20),
    rank=st.integers(0, 7),
    exit_code=st.integers(1, 159),
    age_seconds=st.floats(0, 1e6).map(lambda seconds: round(seconds, 3)),
    charge=st.integers(0, 3),
)


@given(max_restarts=st.integers(0, 9), kinds=st.lists(st.sampled_from(CHARGED), min_size=10, max_size=10))
def test_the_budget_is_spent_by_different_errors_too(max_restarts, kinds):
    run = Run(terms(max_restarts))
    verdicts = [run.fails(record(str(k), kind, node=f"node-{k}")) for k, kind in enumerate(kinds)]
    assert [verdict.restart for verdict in verdicts] == [k < max_restarts for k in range(10)]
    assert f"max_restarts={max_restarts} allows {max_restarts}" in verdicts[-1].why


def test_the_log_counts():
    run = Run(terms())
    assert [run.fails(record(str(k))).why for k in range(3)] == [f"restart {k} of 3 within 1 h" for k in (1, 2, 3)]
    assert run.fails(record("4")).why == "It is failure 4 within 1 h, and max_restarts=3 allows 3."


@given(
    max_restarts=st.integers(0, 4),
    max_failed_rounds=st.integers(1, 6),
    highest=st.integers(0, 5),
    data=st.data(),
)
def test_a_run_without_progress_ends(max_restarts, max_failed_rounds, highest, data):
    """However slow its rounds are: a window by age alone would let it die at the same step for ever."""
    run = Run(terms(max_restarts, max_failed_rounds))
    # Each step that was once the furthest may have its own budget, and each budget its broken connections.
    limit = (highest + 1) * (max_restarts + 2) * max_failed_rounds * 2 + 1
    for _ in range(limit + 1):
        failure = record(
            data.draw(st.sampled_from("abcdef")),
            data.draw(st.sampled_from(KINDS)),
            data.draw(st.none() | st.integers(0, highest)),
        )
        if not run.fails(failure, data.draw(st.floats(0, 1e5)), conclusive=data.draw(st.booleans())).restart:
            return
    pytest.fail(f"after {limit} rounds it still goes on")


@given(rounds=st.integers(5, 40), kind=st.sampled_from(KINDS), more=st.floats(1, 1e4))
def test_a_run_that_gets_further_and_fails_rarely_does_not_end(rounds, kind, more):
    run = Run(terms())
    for k in range(rounds):
        assert run.fails(record("always the same", kind, 100 * (k + 1)), HOUR + more, conclusive=True).restart
        assert len(run.round.failures) <= 2


@given(rounds=st.integers(1, 20), step=st.none() | st.just(0) | st.just(7))
def test_age_alone_does_not_forgive(rounds, step):
    run = Run(terms(max_restarts=rounds - 1))
    for _ in range(rounds - 1):
        assert run.fails(record(step=step), 10 * HOUR).restart
    assert not run.fails(record(step=step), 10 * HOUR).restart


def test_neither_does_progress_alone():
    run = Run(terms(max_restarts=2))
    assert run.fails(record("a", step=10), 60).restart
    assert run.fails(record("b", step=20), 60).restart
    assert not run.fails(record("c", step=30), 60).restart


def test_progress_before_a_round_that_could_not_start_counts():
    run = Run(terms(max_restarts=2))
    for step in (10, 20, 30):
        run.fails(record("a", step=step), 2 * HOUR)
    verdict = run.fails(record("b", "import", step=0), 2 * HOUR, conclusive=True)
    assert verdict.restart
    assert [known.step for known in verdict.failures] == [30, 0]


@pytest.mark.parametrize("kind", ["user", "import", "out_of_memory", "crashed", "exit"])
@pytest.mark.parametrize("between", [0, 2])
def test_the_same_error_without_progress_ends_the_run_at_once(kind, between):
    run = Run(terms(max_restarts=99))
    assert run.fails(record("same", kind, 5, node="node-1"), conclusive=True).restart
    for k in range(between):
        assert run.fails(record(f"other {k}", kind, 5), conclusive=True).restart
    verdict = run.fails(record("same", kind, 5, node="node-0"), conclusive=True)
    assert not verdict.restart
    assert "The same error ended worker 0 on node-1 at step 5" in verdict.why
    assert "not restarted" in verdict.why


def test_the_same_error_behind_its_first_place_is_no_progress_either():
    run = Run(terms())
    assert run.fails(record(step=50), conclusive=True).restart
    assert not run.fails(record(step=41), conclusive=True).restart


@pytest.mark.parametrize(
    ("first", "second", "conclusive"),
    [
        pytest.param(record("same", step=5), record("same", step=6), True, id="progress"),
        pytest.param(record("same", step=5), record("other", step=5), True, id="another error"),
        pytest.param(record("same", "killed", 5), record("same", "killed", 5), False, id="a signal without a word"),
        pytest.param(record("same", step=None), record("same", step=None), True, id="steps unknown"),
    ],
)
def test_otherwise_it_is_restarted(first, second, conclusive):
    run = Run(terms())
    run.fails(first, conclusive=conclusive)
    assert run.fails(second, conclusive=conclusive).restart


def test_a_program_that_cannot_be_loaded_needs_no_steps_to_be_given_up():
    run = Run(terms())
    assert run.fails(record(kind="import", step=None), conclusive=True).restart
    assert not run.fails(record(kind="import", step=None), conclusive=True).restart


def test_broken_connections_without_progress_are_failed_rounds():
    run = Run(terms(max_restarts=0, max_failed_rounds=4))
    verdicts = [run.fails(record(kind="peer")) for _ in range(4)]
    assert [verdict.restart for verdict in verdicts] == [True, True, True, False]
    assert all(verdict.round_failed for verdict in verdicts)
    assert "4 consecutive rounds" in verdicts[-1].why
    assert "max_failed_rounds=4" in verdicts[-1].why


def test_broken_connections_between_which_the_run_got_further_are_free():
    run = Run(terms(max_restarts=0, max_failed_rounds=2))
    for k in range(1, 100):
        verdict = run.fails(record(kind="peer", step=k), 600)
        assert verdict.restart
        assert not verdict.round_failed


def test_long_rounds_that_end_with_a_broken_connection_at_the_same_step_are_charged():
    """The watchdog of a collective that hangs takes half an hour: twenty of them are not free."""
    run = Run(terms(max_restarts=2, max_failed_rounds=20))
    verdicts = [run.fails(record(kind="peer", step=7), 1800) for _ in range(4)]
    assert [verdict.restart for verdict in verdicts] == [True, True, True, False]
    assert sum(known.charge for known in verdicts[-1].failures) == 3


def test_rounds_that_end_for_other_reasons_charge_nothing_and_age_the_others():
    run = Run(terms())
    run.fails(record("a"))
    for _ in range(50):
        run.goes_on(10.5)
    assert [(known.signature, known.age_seconds) for known in run.round.failures] == [("a", 525.0)]


@given(st.lists(records, max_size=5), st.floats(0, 1e6), st.floats(0, 1e6))
def test_ages_add_up(known, first, second):
    known = tuple(known)
    once, twice = aged(known, first + second), aged(aged(known, first), second)
    for one, two, before in zip(once, twice, known, strict=True):
        assert one.age_seconds == pytest.approx(two.age_seconds, abs=0.01)
        assert one.age_seconds >= before.age_seconds
        assert replace(one, age_seconds=0.0) == replace(before, age_seconds=0.0)
    assert aged(known, -5.0) == known


@given(st.lists(records, max_size=3 * MAX_RECORDS), records)
def test_the_row_stays_small_and_no_charge_is_lost(known, failure):
    known = [replace(one, age_seconds=min(one.age_seconds, HOUR)) for one in known]
    limits = terms(10_000).distribution
    verdict = decide_restart(
        known, failure, limits, conclusive=False, seconds=1.0, failed_rounds=0, max_failed_rounds=5
    )
    assert len(verdict.failures) <= MAX_RECORDS
    charge = 0 if failure.kind == "peer" else 1
    assert sum(one.charge for one in verdict.failures) == sum(one.charge for one in known) + charge
    assert len(json.dumps(Round(failures=verdict.failures).to_value())) < 80_000


@given(st.lists(records, max_size=5))
def test_records_survive_the_row(known):
    row = json.loads(json.dumps(Round(failures=tuple(known)).to_value()))
    assert Round.from_value(row).failures == tuple(known)


@pytest.mark.parametrize("value", [None, 3, "x", [1, 2], {}])
def test_a_row_of_another_release_has_no_records(value):
    assert read_records(value) == ()


def test_fields_of_later_releases_are_ignored():
    assert read_records([{**record().__dict__, "colour": "red"}]) == (record(),)


def test_a_loss_that_is_not_finite_ends_the_run_where_the_policy_says_so():
    verdict = Run(terms()).fails(record(kind="nonfinite", step=3))
    assert not verdict.restart
    assert verdict.why == 'on_nonfinite="stop" ends the run.'


def test_without_a_session_the_same_error_before_the_workers_connect_ends_the_run_at_its_first_repeat():
    """No step tells whether there is progress; but a program that has not come so far has made none."""
    run = Run(terms())
    assert run.fails(record(step=None, connected=False), seconds=4.0, conclusive=True).restart
    verdict = run.fails(record(step=None, connected=False, node="node-1"), seconds=40.0, conclusive=True)
    assert not verdict.restart
    assert "The same error ended worker 0 on node-0 about 40 s before" in verdict.why
    assert "have not begun to connect" in verdict.why


@pytest.mark.parametrize(
    ("first", "second", "conclusive"),
    [
        ({}, {"connected": True}, True),
        ({"connected": True}, {}, True),
        ({"signature": "b"}, {}, True),
        ({}, {}, False),
    ],
    ids=["connected now", "connected before", "another error", "a signal without output"],
)
def test_without_a_session_any_other_repeat_is_charged(first, second, conclusive):
    run = Run(terms())
    for fields in (first, second):
        failure = record(step=None, **{"connected": False, **fields})
        assert run.fails(failure, conclusive=conclusive).restart


def test_a_round_between_two_failures_may_have_trained():
    """A program that cannot fetch its data once a day is restarted."""
    run = Run(terms())
    assert run.fails(record(step=None, connected=False), conclusive=True).restart
    run.goes_on(3000.0)
    assert run.fails(record(step=None, connected=False), conclusive=True).restart
    assert not run.fails(record(step=None, connected=False), conclusive=True).restart


@pytest.mark.parametrize("kind", sorted(SUMMARIES))
def test_the_runs_last_message_begins_with_the_users_own_words(kind):
    failure = record(kind=kind, step=12, node="node-3")
    message = closing_message("Traceback\nValueError: no", failure, 4, "It is failure 4.")
    process = "The process of the round's store" if kind == "store" else "Worker 0"
    assert message.startswith(
        f"Traceback\nValueError: no\n\n{process} on node-3 failed in round 4 at step 12 with exit code"
    )
    assert SUMMARIES[kind] in message
    assert "It is failure 4." in message
    assert "at step" not in closing_message("x", record(kind=kind, step=None), 1, "")


@pytest.mark.parametrize(
    ("worker", "run"),
    [(7, 7), (2, 2), (139, 139), (0, 1), (AGENT_LOST, AGENT_LOST), (UNHEALTHY, 1), (PREEMPTED, 1)],
)
def test_a_failed_runs_exit_code_is_its_workers_unless_it_would_mislead(worker, run):
    assert of_failed_run(worker) == run


@pytest.mark.parametrize(
    ("kind", "size", "same"), [("user", 1, True), ("user", 2, False), ("user", 0, True), ("import", 2, True)]
)
def test_an_error_at_another_world_size_is_another_one(kind, size, same):
    run = Run(terms())
    assert run.fails(record(kind=kind, world_size=size), conclusive=True).restart
    assert run.fails(record(kind=kind, world_size=1), conclusive=True).restart != same


@pytest.mark.parametrize(
    ("waiting", "limits", "size"),
    [
        ((), {"max_instance_count": 4}, 4),
        (("c",), {"max_instance_count": 4}, 6),
        (("c", "d", "e"), {"max_instance_count": 4}, 8),
        (("c",), {"max_instance_count": 4, "nodes_per_replica": 2}, 4),
        (("c", "d"), {"max_instance_count": 4, "nodes_per_replica": 2}, 8),
    ],
)
def test_the_next_world_size_is_within_the_limits_of_the_run(waiting, limits, size):
    replica = limits.pop("nodes_per_replica", 1)
    plan = Plan(resources=ElasticResources(**limits), distribution=ElasticDistribution(nodes_per_replica=replica))
    members = tuple(Member(name, "i", slots=2) for name in "ab")
    assert size_with(waiting, Round(state="sealed", members=members), plan) == size
