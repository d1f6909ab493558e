"""The agreement on one step, simulated over random speeds of nodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ipc.agent_messages import Decision, NodeStopped, Prepare, Vote
from azureml_elastic.node.core.boundary import BoundaryCoordinator, BoundaryParticipant


class Worker:
    """A worker as the session behaves: it promises a step only while that is ahead of it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.promised: int | None = None
        self.left_at: int | None = None

    def prepare(self, proposal: Prepare) -> Vote:
        step = proposal.step
        ok = self.step < step
        if ok:
            self.promised = step
        return Vote(proposal.boundary, ok=ok, step=self.step, capable=True, finished=False)

    def decide(self, *, go: bool) -> None:
        if go:
            self.left_at = self.promised
        self.promised = None

    def advance(self, steps: int) -> None:
        limit = self.promised if self.promised is not None else self.left_at
        self.step = self.step + steps if limit is None else min(self.step + steps, limit)


@given(
    starts=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    speeds=st.lists(st.integers(0, 6), min_size=1, max_size=60),
)
def test_all_leave_at_one_step_that_all_have_completed(starts, speeds):
    workers = {f"node-{k}": Worker(100 + start) for k, start in enumerate(starts)}
    coordinator = BoundaryCoordinator(workers)
    pace = itertools.cycle(speeds)  # of all: gradients are averaged, so that nobody gets more than a step ahead
    for attempt in range(200):
        if coordinator.leaving:
            break
        now = 0.1 * attempt
        assert not coordinator.is_busy(now)
        proposal = coordinator.propose(workers["node-0"].step)
        assert coordinator.is_busy(now)
        steps = next(pace)
        answers = []
        for name, worker in workers.items():
            worker.advance(steps)
            answers.append(coordinator.take(name, worker.prepare(proposal), now))
        *early, decision = answers
        assert early == [None] * (len(workers) - 1)
        steps = next(pace)
        for worker in workers.values():
            worker.decide(go=decision.go)
            worker.advance(steps)
    assert coordinator.leaving
    for worker in workers.values():
        worker.advance(1000)
    assert len({worker.left_at for worker in workers.values()}) == 1
    assert {worker.step for worker in workers.values()} == {worker.left_at for worker in workers.values()}


def vote(boundary: int = 1, **fields) -> Vote:
    return Vote(boundary, **{"ok": True, "step": 5, "capable": True, "finished": False, **fields})


def test_a_node_without_sessions_ends_the_attempt():
    coordinator = BoundaryCoordinator(["a", "b"])
    coordinator.propose(5)
    assert coordinator.take("a", vote(), 0.0) is None
    assert coordinator.take("b", vote(ok=False, capable=False), 0.0) == Decision(1, go=False)
    assert coordinator.incapable


def test_a_finished_worker_means_that_the_run_is_about_to_end():
    coordinator = BoundaryCoordinator(["a"])
    coordinator.propose(5)
    coordinator.take("a", vote(ok=False, finished=True), 0.0)
    assert coordinator.finished
    assert not coordinator.leaving


def test_workers_that_are_still_loading_do_not_push_the_step_away():
    coordinator = BoundaryCoordinator(["a"])
    for number in range(1, 20):
        assert coordinator.propose(0).step == 1
        coordinator.take("a", vote(number, ok=False, step=0), number)
        assert coordinator.is_busy(number)
        assert not coordinator.is_busy(number + 1)


def test_late_answers_to_an_older_proposal_do_not_count():
    coordinator = BoundaryCoordinator(["a"])
    coordinator.propose(5)
    assert coordinator.take("a", vote(0), 0.0) is None
    assert not coordinator.leaving


def test_the_leaving_nodes_are_sent_to_everyone():
    coordinator = BoundaryCoordinator(["a"])
    coordinator.propose(5)
    assert coordinator.take("a", vote(), 0.0, ["b"]).leavers == ("b",)


def asked() -> BoundaryParticipant:
    """Return the side of a node with two workers, which have been asked."""
    participant = BoundaryParticipant(2)
    assert participant.ask(Prepare(3, 9, "leave"), frozenset({0, 1}), finished=False) is None
    return participant


def test_a_node_waits_for_every_worker():
    participant = asked()
    assert participant.take(0, Vote(3, ok=True, step=7), finished=False) is None
    assert participant.take(1, Vote(2, ok=True, step=9), finished=False) is None, "an answer to an older proposal"
    assert participant.take(1, Vote(3, ok=True, step=8), finished=False) == vote(3, step=8)


@pytest.mark.parametrize(("ok", "finished"), [(False, False), (True, True)])
def test_one_worker_that_has_passed_the_step_or_finished_speaks_for_its_node(ok, finished):
    participant = asked()
    participant.take(0, Vote(3, ok=ok, step=9), finished=finished)
    whole = participant.take(1, Vote(3, ok=True, step=8), finished=finished)
    assert whole == vote(3, ok=False, step=9, finished=finished)


def test_a_node_that_misses_a_worker_promises_nothing():
    participant = BoundaryParticipant(2)
    answer = participant.ask(Prepare(3, 9, "leave"), frozenset({0}), finished=False)
    assert answer == vote(3, ok=False, step=0, capable=False)
    assert participant.take(0, Vote(3, ok=True, step=7), finished=False) is None


@pytest.mark.parametrize(("finished", "reached"), [("", True), ("a", True), ("ab", False)])
def test_a_boundary_is_reached_when_all_have_stopped_unless_all_have_finished_instead(finished, reached):
    coordinator = BoundaryCoordinator(["a", "b"])
    coordinator.stop("a", NodeStopped(finished="a" in finished))
    assert not coordinator.reached
    coordinator.stop("b", NodeStopped(finished="b" in finished))
    assert coordinator.reached == reached
    assert coordinator.stopped == {"a", "b"}
