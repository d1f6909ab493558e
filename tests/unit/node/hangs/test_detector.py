"""How long is too long: the limits, and the watch over simulated runs."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import ElasticResources, HealthPolicy, Plan
from azureml_elastic.ipc.agent_messages import HangLesson
from azureml_elastic.node.core.events import Hang
from azureml_elastic.node.core.hangs import HangPolicy, pause_limit, step_limit
from azureml_elastic.node.hangs.detector import HangDetector

FLOOR = 300.0
LEARNING = HangPolicy(floor=FLOOR)

seconds = st.floats(0.001, 1e5)
many = st.lists(seconds, min_size=1, max_size=60)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A node's workers, and an agent that looks at them each second."""

    pace = 1.0

    def __init__(self, policy: HangPolicy = LEARNING, *, leads: bool = True) -> None:
        self.clock = Clock()
        self.watch = HangDetector(policy, self.clock)
        self.leads = leads
        self.step = 0

    def begin(self, step: int = 0) -> Run:
        self.watch.begin()
        self.watch.opened()
        self.step = step
        return self

    def wait(self, duration: float) -> Hang | None:
        """Let time pass; return the verdict, if one comes, at the moment when it comes."""
        until = self.clock.now + duration
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + self.pace)
            if (hang := self.watch.verdict(leads=self.leads)) is not None:
                return hang
        return None

    def train(self, *gaps: float) -> Hang | None:
        for gap in gaps:
            if (hang := self.wait(gap)) is not None:
                return hang
            self.step += 1
            self.watch.completed(self.step)
        return None


# --- the limits ------------------------------------------------------------------------------------------------------


@given(many, st.randoms())
def test_the_order_of_the_steps_does_not_matter(gaps, random):
    shuffled = list(gaps)
    random.shuffle(shuffled)
    assert step_limit(LEARNING, shuffled) == step_limit(LEARNING, gaps)


@given(many)
def test_it_is_never_below_the_floor_nor_near_what_was_seen(gaps):
    limit = step_limit(LEARNING, gaps)
    assert limit >= FLOOR
    assert limit >= 2 * max(gaps)
    assert pause_limit(LEARNING, limit) >= max(4 * FLOOR, limit)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=50), st.floats(100, 1e6))
def test_one_long_evaluation_counts_twice_not_tenfold(gaps, evaluation):
    assert step_limit(LEARNING, [*gaps, evaluation]) <= max(FLOOR, 10 * max(gaps), 2 * evaluation)


@given(many, st.floats(1, 1000))
def test_time_has_no_unit(gaps, factor):
    stretched = step_limit(HangPolicy(floor=FLOOR * factor), [gap * factor for gap in gaps])
    assert math.isclose(stretched, factor * step_limit(LEARNING, gaps), rel_tol=1e-9)


@given(many, st.lists(seconds, max_size=60))
def test_what_was_forgotten_but_for_the_longest_is_not_seen_again(newest, older):
    limit = step_limit(LEARNING, newest, max([0.0, *older]))
    assert limit >= 2 * max(newest + older)


@given(many, seconds)
def test_a_fixed_limit_learns_nothing(gaps, fixed):
    assert step_limit(HangPolicy(fixed=fixed), gaps, 1e9) == fixed
    assert pause_limit(HangPolicy(fixed=fixed, floor=10), fixed) >= 4 * max(fixed, 10)


def test_the_policy_is_the_plans():
    def policy(**health):
        return HangPolicy.of(Plan(resources=ElasticResources(max_instance_count=1), health=HealthPolicy(**health)))

    assert policy() == HangPolicy(enabled=True, fixed=None, floor=300)
    assert policy(hang_timeout="7s") == HangPolicy(fixed=7)
    assert not policy(hang_timeout=None).enabled
    fixed = HealthPolicy(hang_timeout="7s")
    assert HealthPolicy.model_validate_json(fixed.model_dump_json()) == fixed
    assert HealthPolicy.model_validate_json(HealthPolicy().model_dump_json()).hang_timeout == "auto"
    with pytest.raises(ValueError, match="not positive"):
        HealthPolicy(hang_timeout=timedelta(0))


# --- the watch -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 0.999), min_size=1, max_size=8))
def test_gaps_within_what_is_allowed_never_fire(fractions):
    run = Run().begin()
    longest = 0.0
    for fraction in fractions:
        gap = fraction * (max(FLOOR, 2 * longest) if run.step else 4 * FLOOR)
        assert run.train(gap) is None
        longest = max(longest, gap) if run.step > 1 else 0.0


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=20))
def test_standing_still_fires_once_when_the_limit_is_over(gaps):
    run = Run().begin()
    assert run.train(10, *gaps) is None
    limit = step_limit(LEARNING, gaps)
    hang = run.wait(2 * limit + 10)
    assert hang.limit == pytest.approx(limit, abs=0.001)
    assert limit - 0.001 <= hang.waited <= limit + 1.001
    assert (hang.step, hang.phase) == (1 + len(gaps), "step")
    assert run.wait(10 * limit) is None
    assert hang.reason.startswith(f"hang: no step after step {hang.step} for {hang.waited:.1f} s (limit ")


@given(st.floats(1, 50 * FLOOR), st.integers(1, 20))
def test_an_evaluation_of_any_length_is_over_after_a_few_restarts(evaluation, rolled_back):
    run = Run().begin()
    run.pace = 4.0
    assert run.train(5, *[1.0] * 20) is None
    for rounds in itertools.count(1):
        assert rounds <= 2 + math.ceil(math.log2(max(1, evaluation / FLOOR)))
        if run.train(evaluation) is None:
            break
        run.begin(21 - rolled_back)
        assert run.train(*[1.0] * rolled_back) is None
    assert run.train(*[1.0] * 20, evaluation) is None  # the next one is known
    assert run.watch.limit <= 2 ** (rounds - 1) * max(FLOOR, 2 * evaluation + 2)


def test_the_longer_limit_after_a_hang_ends_when_training_goes_on():
    run = Run().begin()
    assert run.train(1, 1, 1) is None
    assert run.wait(2 * FLOOR).limit == FLOOR
    run.begin()
    assert run.train(1, 1, 1) is None
    assert run.watch.limit == 2 * FLOOR
    assert run.train(*[100] * 110) is None
    assert run.watch.limit == 2 * 1000
    assert run.train(*[100] * 12) is None
    assert run.watch.limit == 1000


def test_a_program_without_a_session_is_not_watched_and_nothing_is_when_it_is_off():
    alone, off = Run(), Run(HangPolicy(enabled=False)).begin()
    alone.watch.begin()
    assert off.train(1, 1) is None
    assert alone.wait(100 * FLOOR) is off.wait(100 * FLOOR) is None


def test_the_first_step_has_a_longer_limit_and_is_learned_separately():
    run = Run().begin()
    assert run.wait(4 * FLOOR - 1) is None
    assert run.train(0.5) is None
    assert run.watch.limit == FLOOR
    run.begin()
    assert run.watch.limit == pytest.approx(2 * (4 * FLOOR - 0.5))
    hang = run.wait(20 * FLOOR)
    assert hang.phase == "start"
    assert hang.reason.startswith("hang: no first step of the round for ")


def test_a_start_counts_from_the_session_not_from_the_round():
    run = Run()
    run.watch.begin()
    assert run.wait(10 * FLOOR) is None
    run.watch.opened()
    assert run.wait(4 * FLOOR - 1) is None
    assert run.wait(2) is not None


def test_a_finished_or_leaving_worker_ends_the_watch():
    run = Run().begin()
    assert run.train(1, 1) is None
    run.watch.finished()
    assert run.wait(100 * FLOOR) is None
    run.begin(2)
    assert run.train(1, 1) is None
    assert run.wait(2 * FLOOR) is not None


def test_an_unbounded_wait_is_neither_judged_nor_learned():
    run = Run().begin()
    assert run.train(1, 1) is None
    run.watch.busy(bounded=False)
    assert run.wait(100 * FLOOR) is None
    run.watch.free()
    assert run.wait(FLOOR - 1) is None
    assert run.train(0.5) is None
    assert run.watch.limit <= 2 * FLOOR
    run.watch.busy(bounded=False)
    assert run.train(100 * FLOOR) is None  # a step ends it, too
    assert run.watch.limit <= 2 * FLOOR
    assert run.wait(3 * FLOOR) is not None


def test_a_bounded_pause_has_the_limit_of_a_start_and_is_learned():
    run = Run().begin()
    assert run.train(1, 1) is None
    run.watch.busy()
    assert run.wait(4 * FLOOR - 1) is None
    run.watch.free()
    assert run.train(1) is None
    assert run.watch.limit == FLOOR
    run.watch.busy()
    assert run.wait(2 * (4 * FLOOR - 1)) is None
    hang = run.wait(2)
    assert hang.phase == "pause"
    assert "had announced to be busy" in hang.reason


def test_one_worker_of_several_counts():
    run = Run().begin()
    for step in (1, 2):
        run.watch.completed(step, 0)
        run.watch.completed(step, 1)
    run.watch.completed(3, 1)
    run.watch.busy(1, bounded=False)
    assert run.wait(3 * FLOOR) is None
    run.watch.completed(3, 0)
    assert run.wait(3 * FLOOR) is None
    run.watch.free(1)
    assert run.watch.steps == {0: 3, 1: 3}
    assert run.wait(2 * FLOOR).step == 3


def test_steps_that_others_have_completed_before_are_no_progress():
    run = Run().begin()
    assert run.train(1, 1) is None
    assert run.wait(FLOOR - 1) is None
    run.watch.completed(2, local_rank=1)
    assert run.wait(2) is not None


def test_time_in_which_the_agent_itself_was_frozen_does_not_count():
    run = Run().begin()
    assert run.train(1, 1, 1) is None
    assert run.wait(FLOOR - 10) is None
    run.clock.now += 1e6
    assert run.wait(5) is None
    assert run.train(1) is None
    assert run.watch.limit <= 2 * FLOOR
    assert run.wait(2 * FLOOR) is not None


def test_who_does_not_lead_waits_for_more_than_twice_as_long():
    leader, other = Run().begin(), Run(leads=False).begin()
    assert (leader.train(1, 1), other.train(1, 1)) == (None, None)
    late, later = leader.wait(10 * FLOOR), other.wait(10 * FLOOR)
    assert later.waited > 2 * late.waited
    assert later.limit == 2 * FLOOR + 10


def test_a_new_node_receives_what_it_has_not_seen():
    old, new = Run().begin(), Run(leads=False).begin()
    assert old.watch.lesson() is None
    assert old.train(*[1] * 9, FLOOR - 1, 2 * FLOOR - 3) is None
    lesson = old.watch.lesson()
    assert isinstance(lesson, HangLesson)
    assert old.watch.lesson() is None
    assert old.train(1) is None
    assert old.watch.lesson() is None
    new.watch.learn(lesson)
    assert new.train(1, 1) is None
    assert new.watch.limit == old.watch.limit > FLOOR
    old.begin()
    assert old.train(1) is None
    assert old.watch.lesson() is not None  # other nodes than before may be there


def test_a_fixed_limit_stays_after_a_hang():
    run = Run(HangPolicy(fixed=3.0, floor=10)).begin()
    assert run.wait(39) is None
    assert run.train(1, 1) is None
    for _ in range(3):
        hang = run.wait(10)
        assert (hang.limit, hang.waited) == (3.0, 4.0)
        run.begin(0)
        assert run.train(1, 1) is None


def test_another_agents_verdict_counts_as_ones_own():
    run = Run().begin()
    assert run.train(1, 1) is None
    run.watch.fired(Hang(2, FLOOR + 1, FLOOR, "step"))
    assert run.wait(3 * FLOOR) is None, "no second verdict in this round"
    run.begin(2)
    assert run.train(1, 1) is None
    assert run.watch.limit == 2 * FLOOR
