"""How a node's workers get ready before it asks for a place."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.preparing import Preparation, Stage
from azureml_elastic.node.core.round import Member, NewestRound, Round

INTERVAL = 0.5
NEVER = float("inf")
SEALED = Round(1, "sealed", members=(Member("a", "i-a"), Member("b", "i-b")))


class Workers:
    """Workers of a node, whose preload server becomes ready and settled at these times."""

    def __init__(self, ready: float = 0.0, settled: float = 0.0, *, stays: bool = False, nodes: int = 2) -> None:
        self.now, self.done, self.newest, self.ready, self.settled = 0.0, [], NewestRound(), ready, settled
        self.preloaded, self.parked_at = True, NEVER
        self.alive = self.ended = self.importing = False
        self.found = Round(1, "open")
        plan = Plan(
            resources=ElasticResources(max_instance_count=nodes),
            distribution=ElasticDistribution(handover_timeout=timedelta(seconds=5)),
        )
        self.preparation = Preparation("b", plan, self.newest, stays=stays)

    def seen(self) -> ev.ReadinessSeen:
        return ev.ReadinessSeen(
            preloaded=self.preloaded,
            ready=self.now >= self.ready,
            settled=self.now >= self.settled,
            importing=self.importing,
            alive=self.alive,
            parked=self.now >= self.parked_at,
            ended=self.ended,
        )

    def prepare(self, before: Round | None = None) -> float:
        """Return when the node may ask for a place."""
        return self.go_on(self.preparation.begin(before))

    def go_on(self, actions: list[do.Action]) -> float:
        while True:
            self.done += actions
            if self.preparation.stage is Stage.READY or any(isinstance(each, do.FailEarly) for each in actions):
                return self.now
            if any(isinstance(each, do.ReadRound) for each in actions):
                actions = self.preparation.handle(ev.RoundRead(self.found), self.now)
                continue
            before = self.preparation.stage
            actions = self.preparation.handle(self.seen(), self.now)
            if not actions and self.preparation.stage is before:
                self.now += INTERVAL

    def count(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.done)


@pytest.mark.parametrize(
    ("ready", "settled", "sealed", "expected"),
    [
        (2.0, 5.0, True, 5.0),
        (2.0, 5.0, False, 2.0),
        (100.0, 110.0, True, 110.0),
        (100.0, NEVER, True, 130.0),
        (100.0, 100.0, False, 100.0),
        (NEVER, 8.0, True, 8.0),  # the preload server refuses
        (NEVER, NEVER, True, 600.0),
        (NEVER, NEVER, False, 600.0),
    ],
)
def test_a_newcomer_waits_for_its_imports_up_to_ten_minutes(ready, settled, sealed, expected):
    workers = Workers(ready, settled)
    workers.found = SEALED if sealed else workers.found
    assert workers.prepare() == expected
    assert workers.count(do.RecordReady) == 1


def test_imports_that_hang_are_logged_once():
    workers = Workers(NEVER, NEVER)
    workers.prepare()
    assert [each.text for each in workers.done if isinstance(each, do.Log)] == [
        (
            "The script's imports have not ended within 600 s; joining without them. The other nodes may have to wait "
            "for this one's workers."
        )
    ]
    assert workers.count(do.ReadRound) < 62
    workers.preparation.begin_as_spare(workers.now)
    assert workers.go_on([]) == 600.0, "it does not wait again"
    assert workers.count(do.Log) == 1


def test_a_node_that_is_ready_does_not_wait_again():
    workers = Workers(2.0, NEVER)
    assert workers.prepare() == 2.0
    workers.preparation.begin_as_spare(workers.now)
    assert workers.go_on([]) == 2.0
    assert not workers.preparation.waited


def test_a_newcomer_that_still_imports_notices_the_end_of_the_run():
    workers = Workers(300.0, 300.0)
    actions = workers.preparation.begin(None)
    while workers.now < 42.0:
        actions = workers.preparation.handle(ev.RoundRead(workers.found) if actions else workers.seen(), workers.now)
        workers.now += INTERVAL
    workers.found = Round(3, "succeeded")
    assert 42.0 <= workers.go_on(actions) < 52.5


def test_one_that_makes_its_imports_itself_waits_for_the_announcements_of_others():
    workers = Workers()
    workers.preloaded = False
    assert workers.prepare() == 1.0
    alone = Workers(nodes=1)
    alone.preloaded = False
    assert alone.prepare() == 0.0


def test_workers_that_stay_are_started_before_the_first_round_and_then_kept():
    workers = Workers(stays=True)
    workers.parked_at = 3.0
    assert workers.prepare() == 3.0
    assert workers.count(do.ReplaceWorkers) == 1
    workers.alive, workers.parked_at = True, 5.0
    workers.newest.observe(Round(2, "open", previous=("a", "b")))
    assert workers.prepare(SEALED) == 5.0
    assert workers.count(do.ReplaceWorkers) == 1
    assert workers.count(do.ReadRound) == 1, "the end of the round is known"


@pytest.mark.parametrize("known", [True, False])
def test_where_the_others_have_gone_on_without_this_node_its_workers_hand_over_to_new_ones(known):
    workers = Workers(stays=True)
    workers.alive, workers.parked_at = True, 0.0
    workers.found = Round(2, "open", previous=("a",))
    if known:
        workers.newest.observe(workers.found)
    workers.prepare(SEALED)
    assert workers.count(do.ReplaceWorkers) == 1
    assert workers.count(do.ReadRound) == (not known)


def test_workers_that_do_not_park_in_time_are_replaced():
    workers = Workers(stays=True)
    workers.alive, workers.parked_at = True, 7.0
    assert workers.prepare(SEALED) == 7.0
    assert workers.count(do.ReplaceWorkers) == 1


def test_a_worker_that_ends_before_it_parks_fails_the_run():
    workers = Workers(stays=True)
    workers.ended = True
    workers.prepare()
    assert workers.count(do.FailEarly) == 1


def test_a_node_whose_preload_server_was_started_again_waits_for_it_after_a_round():
    workers = Workers(4.0, 9.0)
    workers.importing = True
    assert workers.prepare(SEALED) == 4.0
