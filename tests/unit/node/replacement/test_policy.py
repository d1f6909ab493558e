"""Decisions which node jobs to submit and to cancel."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import NodePool, ReplacementPolicy
from azureml_elastic.config.resources import first_nodes, replacement_name, step_names
from azureml_elastic.node.replacement.policy import NodeJob, Start, Stop, cost, decide, next_change

SPOT = NodePool("spot", max_instance_count=6, price_per_hour=1.0)
DEDICATED = NodePool("dedicated", min_instance_count=1, max_instance_count=2, price_per_hour=5.0)
POOLS = (SPOT, DEDICATED)
POLICY = ReplacementPolicy(fallback_after=600, retry_after=60)
HOURS = 7200.0


def jobs(*states, pool=0, **fields):
    return [NodeJob(pool, number, f"p{pool}n{number}", state, **fields) for number, state in enumerate(states)]


def running(count, pool=0):
    return jobs(*["running"] * count, pool=pool, ran_s=HOURS)


def ask(pools, most, found, policy=POLICY, *, over=None):
    """Return the decision as pools of starts and names of stops."""
    actions = decide(pools, most, found, policy, over=over)
    starts = [(action.pool, action.number) for action in actions if isinstance(action, Start)]
    return starts, [action.job.name for action in actions if isinstance(action, Stop)]


def test_a_run_that_has_all_its_nodes_is_left_alone():
    assert ask(POOLS, 6, running(5) + running(1, pool=1)) == ([], [])


def test_a_lost_node_is_asked_for_again_in_its_own_pool():
    lost = replace(running(5)[4], state="ended", ended_s=1.0)
    assert ask(POOLS, 6, [*running(4), lost, *running(1, pool=1)]) == ([(0, 5)], [])


def test_the_next_pool_is_asked_when_a_node_does_not_come():
    found = [*running(4), *running(1, pool=1), NodeJob(0, 4, "late", "waiting", waited_s=599.0)]
    assert ask(POOLS, 6, found) == ([], [])
    found[-1] = replace(found[-1], waited_s=600.0)
    assert ask(POOLS, 6, found) == ([(1, 1)], [])
    # No more than the second pool may give, and nothing more of the pool that keeps a node waiting.
    found[3] = replace(found[3], state="ended", ended_s=HOURS)
    assert ask(POOLS, 6, found) == ([(1, 1)], [])


def test_a_node_of_the_fallback_goes_when_one_that_is_wanted_more_has_come():
    found = [*running(5), *running(2, pool=1)]
    assert ask(POOLS, 6, found) == ([], ["p1n1"])
    # A node of the first pool that may still come is waited for.
    found = [*running(4), NodeJob(0, 4, "late", "waiting", waited_s=HOURS), *running(2, pool=1)]
    assert ask(POOLS, 6, found) == ([], [])


def test_a_node_that_would_find_no_place_is_waited_for_no_longer():
    found = [*running(5), *running(1, pool=1), NodeJob(1, 1, "late", "waiting", waited_s=1.0)]
    assert ask(POOLS, 6, found) == ([], ["late"])


def test_the_floor_of_a_pool_is_kept_though_the_others_are_full():
    found = [*running(6), replace(running(1, pool=1)[0], state="ended", ended_s=1.0)]
    assert ask(POOLS, 6, found) == ([(1, 1)], [])
    # When it is there, one of the others goes.
    found = [*running(6), replace(running(1, pool=1)[0], number=1)]
    assert ask(POOLS, 6, found) == ([], ["p0n5"])


def test_a_node_that_its_owner_has_cancelled_is_not_wanted_back():
    found = [*running(4), NodeJob(0, 4, "out", "cancelled"), *running(1, pool=1)]
    assert ask(POOLS, 6, found) == ([], [])
    assert ask(POOLS, 6, [replace(job, stopped=job.name == "out") for job in found]) == ([(0, 5)], [])
    assert ask((DEDICATED,), 1, [NodeJob(0, 0, "out", "cancelled")]) == ([], [])


def test_when_the_run_has_ended_only_those_that_wait_are_let_go():
    found = [*running(2), NodeJob(0, 2, "late", "waiting"), NodeJob(1, 0, "other", "waiting", waited_s=HOURS)]
    assert ask(POOLS, 6, found, over="ended") == ([], ["late", "other"])
    assert ask(POOLS, 6, found, over="cancelled") == ([], ["p0n0", "p0n1", "late", "other"])


def test_a_pool_whose_nodes_end_early_is_asked_less_and_less_often():
    pool = (NodePool("spot", max_instance_count=1),)

    def early(count, ended_s):
        ends = [ended_s + 100.0 * later for later in range(count)][::-1]
        return [NodeJob(0, n, f"n{n}", "ended", first=n == 0, ran_s=5.0, ended_s=end) for n, end in enumerate(ends)]

    assert ask(pool, 1, early(1, 59.0)) == ([], [])
    assert ask(pool, 1, early(1, 60.0)) == ([(0, 1)], [])
    assert ask(pool, 1, early(3, 239.0)) == ([], [])
    assert ask(pool, 1, early(3, 240.0)) == ([(0, 3)], [])
    assert ask(pool, 1, early(30, 3599.0)) == ([], [])
    assert ask(pool, 1, early(30, 3600.0)) == ([], [])  # ten for each node is the limit
    assert ask(pool, 1, [replace(job, first=True) for job in early(30, 3600.0)]) == ([(0, 30)], [])


def test_the_pause_of_one_pool_lets_the_next_one_help():
    pools = (NodePool("a", max_instance_count=1), NodePool("b", max_instance_count=1))
    early = [NodeJob(0, n, f"n{n}", "ended", ran_s=5.0, ended_s=599.0) for n in range(5)]
    assert ask(pools, 1, early) == ([], [])
    assert ask(pools, 1, [replace(job, ended_s=600.0) for job in early]) == ([(1, 0)], [])


def test_no_more_is_asked_for_than_the_policy_allows():
    lost = [NodeJob(0, n, f"n{n}", "ended", first=n < 2, ran_s=HOURS, ended_s=HOURS) for n in range(4)]
    pool = (NodePool("spot", max_instance_count=2),)
    assert ask(pool, 2, lost, ReplacementPolicy(max_replacements=3)) == ([(0, 4)], [])
    assert ask(pool, 2, lost, ReplacementPolicy(max_replacements=2)) == ([], [])
    assert ask(pool, 2, lost, ReplacementPolicy(max_replacements=0)) == ([], [])


def test_the_budget_ends_it():
    lost = [NodeJob(0, 0, "n", "ended", ran_s=3 * 3600.0, ended_s=HOURS), *running(1, pool=1)]
    assert cost(POOLS, lost) == pytest.approx(3 * 1.0 + 2 * 5.0)
    assert ask(POOLS, 2, lost, ReplacementPolicy(budget=13.01)) == ([(0, 1)], [])
    assert ask(POOLS, 2, lost, ReplacementPolicy(budget=13.0)) == ([], [])


pools_of_any_kind = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5)).map(
        lambda pair: NodePool("c", min_instance_count=min(pair), max_instance_count=max(*pair, 1))
    ),
    min_size=1,
    max_size=4,
)


@given(pools_of_any_kind, st.data())
def test_any_history_comes_to_rest_with_the_right_nodes(pools, data):
    """Whatever has happened: when all that is asked for comes, the run has its nodes, and nothing more is done."""
    most = data.draw(
        st.integers(max(1, sum(p.min_instance_count for p in pools)), sum(p.max_instance_count for p in pools))
    )
    found = [
        NodeJob(
            pool, number, f"p{pool}n{number}", data.draw(st.sampled_from(["waiting", "running", "ended"])), ran_s=HOURS
        )
        for pool, count in enumerate(first_nodes(pools, most))
        for number in range(count)
    ]
    policy = ReplacementPolicy(fallback_after=timedelta(days=1), max_replacements=1000)
    for _ in range(4):
        for action in decide(pools, most, found, policy):
            if isinstance(action, Start):
                assert action.number == sum(job.pool == action.pool for job in found)
                found.append(
                    NodeJob(action.pool, action.number, f"p{action.pool}n{action.number}", "waiting", first=False)
                )
            else:
                found[found.index(action.job)] = replace(action.job, state="cancelled", stopped=True)
        found = [replace(job, state="running", ran_s=HOURS) if job.state == "waiting" else job for job in found]
    assert decide(pools, most, found, policy) == []
    counts = [sum(job.pool == pool and job.state == "running" for job in found) for pool in range(len(pools))]
    assert sum(counts) == most
    for pool, count in zip(pools, counts, strict=True):
        assert pool.min_instance_count <= count <= pool.max_instance_count


@given(pools_of_any_kind, st.data())
def test_the_first_nodes_are_the_floors_and_then_the_first_pools(pools, data):
    most = data.draw(st.integers(sum(p.min_instance_count for p in pools), sum(p.max_instance_count for p in pools)))
    counts = first_nodes(pools, most)
    assert sum(counts) == most
    full = True
    for pool, count in zip(pools, counts, strict=True):
        assert pool.min_instance_count <= count <= pool.max_instance_count
        assert full or count == pool.min_instance_count
        full = full and count == pool.max_instance_count


def test_nodes_are_named_after_their_pools():
    pools = [NodePool(name, max_instance_count=1) for name in ("Spot-A", "spot_a", "9", "azureml:sure")]
    assert step_names(pools) == ("spot_a", "spot_a_x", "pool_9", "sure")
    assert pools[3].compute == "sure"
    with pytest.raises(ValueError, match="no name of a cluster"):
        NodePool("/subscriptions/s/computes/c", max_instance_count=1)
    assert step_names(()) == ("node",)


def test_the_names_of_jobs_have_their_limit():
    assert replacement_name("run", "spot_a", 3) == "run-spot-a-3"
    names = {replacement_name("r" * 200 + tail, "s" * 40, number) for tail in ("a" * 55, "b" * 55) for number in (1, 2)}
    assert len(names) == 4
    assert max(len(name) for name in names) == 255


STATES = st.tuples(st.integers(0, 1), st.sampled_from(["waiting", "running", "ended"]), st.integers(0, 1500))


@given(st.lists(STATES, max_size=8), st.floats(0, 1))
def test_a_decision_stays_the_same_until_its_next_change(drawn, share):
    found = [
        NodeJob(pool, number, f"n{number}", state, waited_s=age, ran_s=age, ended_s=age)
        for number, (pool, state, age) in enumerate(drawn)
    ]
    left = next_change(POOLS, found, POLICY)
    assert left > 0
    later = min(left, HOURS) * share * 0.999
    aged = [
        replace(
            job,
            waited_s=job.waited_s + later,
            ran_s=job.ran_s + (later if job.state == "running" else 0),
            ended_s=job.ended_s + later,
        )
        for job in found
    ]
    assert ask(POOLS, 6, found) == ask(POOLS, 6, aged)
