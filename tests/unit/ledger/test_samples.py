"""The audit accepts correct histories and detects missed and repeated samples."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ledger.events import Progress, Restored
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.samples import (
    SampleAudit,
    SampleLine,
    audit_samples,
    surviving_steps,
    trained_samples,
)


@st.composite
def histories(draw):
    """Generate an elastic run: rounds of any world size, each restored from an earlier completed step."""
    size = draw(st.integers(1, 30))
    batch = draw(st.integers(1, 8))
    epochs = draw(st.integers(1, 3))
    per_epoch = -(-size // batch)
    total = per_epoch * epochs
    rng = random.Random(draw(st.integers(0, 1000)))
    orders = [rng.sample(range(size), size) for _ in range(epochs)]
    lines, restored, number, step, floor = [], {}, 0, 0, 0
    trained = 0
    while step < total:
        number += 1
        restored[number] = step
        world = draw(st.integers(1, 4))
        last = number > 5
        until = total if last else draw(st.integers(step, total))
        for at in range(step, until):
            epoch, window = divmod(at, per_epoch)
            ids = orders[epoch][window * batch : (window + 1) * batch]
            trained += len(ids)
            lines += [SampleLine(number, at + 1, epoch, tuple(ids[rank::world])) for rank in range(world)]
        if until < total:
            floor = draw(st.integers(0, until))
            step = floor
        else:
            step = total
    draw(st.randoms()).shuffle(lines)
    return size, epochs, total, lines, restored, trained


@given(histories())
def test_a_correct_history_is_exactly_once(history):
    size, epochs, total, lines, restored, trained = history
    audit = audit_samples(lines, restored)
    assert audit.complete
    assert (audit.dataset_size, audit.epochs, audit.steps, audit.seen) == (size, epochs, total, size * epochs)
    assert audit.rolled_back_samples == trained - size * epochs


@pytest.mark.parametrize("lost", [True, False])
@given(histories(), st.data())
def test_a_lost_sample_is_missed_and_one_seen_twice_is_repeated(lost, history, data):
    size, epochs, _, lines, restored, _ = history
    surviving = surviving_steps(restored, (line.round for line in lines))
    counted = [index for index, line in enumerate(lines) if line.ids and line.step <= surviving[line.round]]
    index = data.draw(st.sampled_from(counted))
    line = lines[index]
    lines[index] = replace(line, ids=line.ids[1:] if lost else (*line.ids, line.ids[0]))
    audit = audit_samples(lines, restored, dataset_size=size)
    assert not audit.complete
    missing = ((0, 1) if line.epoch == epochs - 1 else (1, 0)) if lost else (0, 0)
    assert (audit.missing, audit.unfinished, audit.repeated) == (*missing, not lost)
    assert lost or not audit.exactly_once


def test_a_round_that_trains_steps_which_it_restored_is_caught():
    lines = [SampleLine(1, 1, 0, (0, 1)), SampleLine(1, 2, 0, (2, 3)), SampleLine(2, 2, 0, (2, 3))]
    audit = audit_samples(lines, {1: 0, 2: 2})
    assert (audit.repeated, audit.rolled_back_steps) == (2, 0)


def test_steps_that_a_restore_skipped_are_missed():
    lines = [SampleLine(1, 1, 0, (0, 1)), SampleLine(2, 3, 0, (4, 5)), SampleLine(2, 4, 1, (0, 1, 2, 3, 4, 5))]
    audit = audit_samples(lines, {1: 0, 2: 2})
    assert (audit.missing, audit.repeated) == (2, 0)


def test_a_later_round_may_undo_several_rounds():
    lines = [SampleLine(1, step, 0, (step - 1,)) for step in range(1, 6)]  # 1 to 5
    lines += [SampleLine(2, step, 0, (step - 1,)) for step in range(5, 8)]  # restored 4, trained 5 to 7
    lines += [SampleLine(3, step, 0, (step - 1,)) for step in range(3, 9)]  # restored 2: the newer one was damaged
    audit = audit_samples(lines, {1: 0, 2: 4, 3: 2})
    assert audit.complete
    assert (audit.rolled_back_steps, audit.rolled_back_samples) == (6, 6)


def test_a_zombie_of_an_older_round_does_not_count():
    lines = [SampleLine(1, 1, 0, (0,)), SampleLine(1, 2, 0, (1,)), SampleLine(2, 2, 0, (1,))]
    assert audit_samples(lines, {1: 0, 2: 1}).complete


def test_an_early_stop_is_distinguished_from_a_loss():
    lines = [SampleLine(1, 1, 0, (0, 1, 2)), SampleLine(1, 2, 1, (2,))]
    audit = audit_samples(lines, {1: 0}, torn_lines=3)
    assert audit.exactly_once
    assert not audit.complete
    assert (audit.unfinished, audit.torn_lines) == (2, 3)


def test_samples_of_a_dropped_batch_are_not_missing():
    """Each epoch drops another one of five samples."""
    lines = [SampleLine(1, 1, 0, (4, 1, 2, 0), of=4), SampleLine(1, 2, 1, (0, 3, 2, 1), of=4)]
    audit = audit_samples(lines, {1: 0})
    assert audit.complete
    assert (audit.dataset_size, audit.seen) == (4, 8)


def test_a_sample_without_any_line_is_missing():
    lines = [SampleLine(1, 1, 0, (0, 1), of=3), SampleLine(1, 2, 1, (1, 0), of=3)]
    audit = audit_samples(lines, {1: 0})
    assert (audit.missing, audit.unfinished) == (1, 1)


def test_an_audit_without_lines_is_not_complete():
    assert audit_samples([], {}) == SampleAudit()
    assert not SampleAudit().complete


def test_the_steps_that_rounds_restored_from():
    events = [
        Restored(time=0, node="a", round=1, step=0),
        Progress(time=1, node="a", round=1, step=5),
        Restored(time=2, node="b", round=3, step=4),
    ]
    assert Picture.of(events).restored == {1: 0, 3: 4}


def test_a_step_counts_when_any_rank_has_completed_it():
    died = [SampleLine(1, 1, 0, (0,), done=False), SampleLine(1, 2, 0, (2,), done=False)]
    survived = [SampleLine(1, 1, 0, (1,)), SampleLine(1, 2, 0, (3,))]
    given_up = [SampleLine(1, 3, 0, (4,), done=False)]
    again = [SampleLine(2, 3, 0, (4, 5))]
    audit = audit_samples([*died, *survived, *given_up, *again], {1: 0, 2: 2}, dataset_size=6)
    assert audit.complete
    assert (audit.steps, audit.seen, audit.rolled_back_steps) == (3, 6, 0)


def progress(number, step, samples, node="a"):
    return Progress(time=step, node=node, round=number, step=step, samples=samples)


def test_samples_of_steps_that_count_are_summed_over_the_rounds():
    assert trained_samples(Picture.of([])) is None
    assert trained_samples(Picture.of([progress(1, 3, None)])) is None
    events = [progress(1, 2, 20), progress(1, 4, 40), progress(1, 4, 40, "b")]
    assert trained_samples(Picture.of(events)) == 40
    events += [Restored(time=5, node="a", round=2, step=4), progress(2, 6, 24)]
    assert trained_samples(Picture.of(events)) == 64
    rolled_back = [*events, Restored(time=7, node="a", round=3, step=3), progress(3, 5, 16)]
    assert trained_samples(Picture.of(rolled_back)) == 30 + 16
    from_scratch = [*rolled_back, Restored(time=9, node="a", round=4, step=0)]
    assert trained_samples(Picture.of(from_scratch)) == 0
