"""The picture of a run: the state of its nodes, and that it depends on what was recorded alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ledger.accounting import account
from azureml_elastic.ledger.events import NodeLeft, Progress, RoundEntered, RoundReopened, RunEnded
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.samples import trained_samples
from azureml_elastic.ledger.timeline import recoveries, rounds
from azureml_elastic.report.series import metric_series, throughput
from tests.support.histories import any_events, enter, loss_and_newcomer


def read(picture):
    """All that the views show of a picture."""
    now = picture.now
    return (
        [picture.all(kind) for kind in (RoundEntered, Progress, RoundReopened, NodeLeft)],
        replace(now, nodes=tuple(sorted(now.nodes, key=lambda node: node.name))),
        rounds(picture),
        recoveries(picture),
        account(picture),
        trained_samples(picture),
        metric_series(picture),
        throughput(picture, {}),
    )


@given(any_events() | st.just(loss_and_newcomer()), st.randoms(use_true_random=False), st.booleans())
def test_the_picture_is_the_same_however_the_events_are_cut_and_mixed(events, random, looks):
    """Events of one node stay in order; a view that looks between two batches changes nothing."""
    files = {}
    for event in events:
        files.setdefault(event.node, []).append(event)
    picture, left = Picture(), list(files.values())
    while left:
        own = random.choice(left)
        count = random.choice([1, 7, len(own)])
        picture.apply(own[:count])
        del own[:count]
        left = [each for each in left if each]
        if looks:
            read(picture)
    assert read(picture) == read(Picture.of(events))


def states(picture):
    return {node.name: node.state for node in picture.now.nodes}


def test_a_run_is_described_from_its_first_round_to_its_end():
    picture = Picture()
    assert (picture.now.headline, picture.now.progress) == ("Round 1 waits for its nodes", "no checkpoint yet")
    lines = []
    for event in loss_and_newcomer():
        picture.apply([event])
        lines += [] if picture.now.headline in lines else [picture.now.headline]
    assert lines == [
        "Round 1 waits for its nodes",
        "Round 1: world size 3 on 3 nodes",
        "Round 2 waits for its nodes, after: node-0 is lost",
        "Round 2: world size 2 on 2 nodes",
        "Round 3 waits for its nodes, after: node-3 is ready",
        "Round 3: world size 3 on 3 nodes",
        "The run succeeded in round 3",
    ]
    assert picture.now.progress == "step 30, no checkpoint yet"
    assert (picture.now.rank0, picture.now.sizes) == ("node-1", (3, 2, 3))
    failed = RunEnded(time=60.0, node="node-1", round=4, succeeded=False, message="why")
    assert Picture.of([failed]).now.headline == "The run failed in round 4: why"


def test_a_lost_node_is_shown_as_lost_until_it_comes_back():
    picture = Picture.of(enter(1, ["a", "b", "c"], at=1.0))
    picture.apply([NodeLeft(time=2.5, node="c", round=1, reason="preempted", exit_code=143)])
    picture.apply([RoundReopened(time=3.0, node="a", round=1, reason="b is lost", lost=("b", "c"))])
    assert states(picture) == {"a": "re-forming", "b": "lost", "c": "leaving"}
    picture.apply(enter(2, ["a", "b"], at=4.0))
    assert states(picture)["b"] == "workers started"


@pytest.mark.parametrize("alive", [True, False])
def test_what_the_launcher_has_seen_stands_until_the_next_event_of_a_node_that_lives(alive):
    picture = Picture.of(enter(1, ["a", "b"], at=1.0))
    picture.observe("b", "frozen" if alive else "killed", alive=alive)
    picture.apply([RoundReopened(time=3.0, node="a", round=1, reason="b is lost", lost=("b",))])
    assert states(picture)["b"] == ("frozen" if alive else "killed")
    picture.apply(enter(2, ["b"], at=4.0))
    assert states(picture)["b"] == ("workers started" if alive else "killed")
