"""The states of a step, as lists of calls: what each makes of them, and what is to be done then."""

from __future__ import annotations

import random

import pytest

from azureml_elastic.train.step_state import Deferred, StepMachine, StepState

BETWEEN, ACCUMULATING, STEPPED, AT_BOUNDARY, DEFERRED, DISCARDED, RESTORING, OVER = StepState

CALLS = {
    "take": StepMachine.take,
    "leave": StepMachine.leave,
    "update": StepMachine.update,
    "revert update": StepMachine.revert_update,
    "complete": lambda machine: machine.complete(pending=False),
    "complete, code follows": lambda machine: machine.complete(pending=True),
    "begin boundary": StepMachine.begin_boundary,
    "end boundary": StepMachine.end_boundary,
    "defer": StepMachine.defer,
    "save": lambda machine: machine.defer_save(wait=False),
    "save and wait": lambda machine: machine.defer_save(wait=True),
    "end code": StepMachine.end_code,
    "discard": StepMachine.discard,
    "undone": StepMachine.undone,
    "restore": StepMachine.restore,
    "restored": lambda machine: machine.restored(in_step=False),
    "restored in a step": lambda machine: machine.restored(in_step=True),
    "finish": StepMachine.finish,
}


def after(*calls):
    """Return the machine after these calls."""
    machine = StepMachine()
    for call in calls:
        CALLS[call](machine)
    return machine


@pytest.mark.parametrize(
    ("calls", "state"),
    [
        ([], BETWEEN),
        (["take"], ACCUMULATING),
        (["take", "take"], ACCUMULATING),
        (["take", "leave"], BETWEEN),
        (["take", "update"], STEPPED),
        (["update"], STEPPED),
        (["take", "update", "take"], STEPPED),
        (["take", "update", "leave"], STEPPED),
        (["take", "update", "complete"], AT_BOUNDARY),
        (["take", "complete"], AT_BOUNDARY),
        (["complete", "end boundary"], BETWEEN),
        (["begin boundary", "end boundary", "take"], ACCUMULATING),
        (["take", "update", "complete, code follows"], DEFERRED),
        (["complete, code follows", "end code", "begin boundary"], AT_BOUNDARY),
        (["complete, code follows", "update"], STEPPED),
        (["complete, code follows", "update", "end code"], STEPPED),
        (["complete, code follows", "update", "complete"], DEFERRED),
        (["take", "update", "update", "revert update"], BETWEEN),
        (["complete, code follows", "update", "revert update"], DEFERRED),
        (["complete, code follows", "update", "end code", "revert update"], BETWEEN),
        (["take", "revert update"], ACCUMULATING),
        (["defer"], DEFERRED),
        (["take", "discard"], DISCARDED),
        (["take", "discard", "update"], DISCARDED),
        (["take", "discard", "take", "leave"], DISCARDED),
        (["take", "discard", "undone"], BETWEEN),
        (["take", "discard", "discard"], DISCARDED),
        (["defer", "discard", "undone"], DEFERRED),
        (["take", "restore"], RESTORING),
        (["restore", "update"], RESTORING),
        (["restore", "restore", "restored"], BETWEEN),
        (["take", "restore", "restored in a step", "discard"], DISCARDED),
        (["complete", "restore", "restored", "end boundary"], BETWEEN),
        (["defer", "restore", "restored"], DEFERRED),
        (["take", "update", "finish"], OVER),
        (["finish", "take", "update", "leave", "end boundary"], OVER),
    ],
    ids=lambda value: value.value if isinstance(value, StepState) else ", ".join(value) or "nothing",
)
def test_calls_lead_to_a_state(calls, state):
    assert after(*calls).state is state


@pytest.mark.parametrize(
    ("calls", "due"),
    [
        (["take", "update", "complete"], Deferred()),
        (["complete, code follows"], Deferred(boundary=True)),
        (["complete, code follows", "save"], Deferred(boundary=True, save=False)),
        (["complete, code follows", "save and wait", "save"], Deferred(boundary=True, save=True)),
        (["complete, code follows", "update"], Deferred(boundary=True)),
        (["complete, code follows", "defer"], Deferred(boundary=True)),
        (["defer", "save"], Deferred(save=False)),
        (["defer", "complete, code follows"], Deferred(boundary=True)),
        (["defer", "discard", "undone", "save and wait"], Deferred(save=True)),
        (["save and wait"], Deferred()),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else "",
)
def test_what_was_deferred_is_done_once_when_the_code_has_ended(calls, due):
    machine = after(*calls)
    assert machine.end_code() == due
    assert not machine.pending
    assert machine.end_code() == Deferred()


def test_a_checkpoint_waits_only_while_code_of_the_step_runs():
    assert not after("take", "update", "complete", "end boundary").defer_save(wait=True)
    assert after("complete, code follows").defer_save(wait=True)


@pytest.mark.parametrize(
    ("calls", "whole"),
    [
        (["take"], True),
        (["take", "update"], False),
        (["take", "update", "revert update"], True),
        (["take", "update", "complete"], True),
        (["take", "update", "complete, code follows"], True),
        (["complete, code follows", "update"], False),
        (["take", "discard", "update"], True),
        (["restore"], False),
        (["restore", "restored"], True),
        (["finish"], False),
    ],
)
def test_only_the_weights_of_a_completed_step_are_handed_over(calls, whole):
    assert after(*calls).whole is whole


def test_the_empty_step_of_an_optimizer_whose_state_is_read_is_none():
    machine = after("take")
    with machine.read():
        machine.update()
        with machine.read():
            machine.update()
        machine.update()
        assert not machine.first_update(has_loader=True)
    assert machine.state is ACCUMULATING
    assert machine.first_update(has_loader=True)
    machine.update()
    assert machine.state is STEPPED


def test_the_first_batch_of_a_step_begins_it():
    machine = StepMachine()
    assert [machine.take(), machine.take()] == [True, False]
    machine.update()
    assert not machine.take(), "the batch of a second model, whose optimizer steps in the same step"
    machine.complete(pending=False)
    machine.end_boundary()
    machine.take()
    machine.discard()
    assert not machine.take()


def test_reading_ends_with_an_error():
    machine = StepMachine()
    with pytest.raises(OSError, match="full"), machine.read():
        raise OSError("full")
    machine.update()
    assert machine.state is STEPPED


@pytest.mark.parametrize(
    ("calls", "with_loader", "without"),
    [
        ([], False, True),
        (["take"], True, True),
        (["take", "update"], False, False),
        (["take", "discard"], False, False),
        (["complete, code follows"], False, True),
        (["restore"], False, False),
    ],
)
def test_the_ranks_of_a_replica_agree_on_the_first_update_of_a_step_alone(calls, with_loader, without):
    machine = after(*calls)
    assert (machine.first_update(has_loader=True), machine.first_update(has_loader=False)) == (with_loader, without)


@pytest.mark.parametrize(
    ("calls", "impossible"),
    [
        (["complete, code follows"], "take"),
        (["take", "discard"], "complete"),
        (["restore"], "complete"),
        (["finish"], "complete"),
        (["take"], "defer"),
        (["take", "update"], "discard"),
        (["finish"], "discard"),
        (["take"], "undone"),
        (["take"], "restored"),
        (["finish"], "restore"),
    ],
)
def test_a_call_that_cannot_be_is_a_defect(calls, impossible):
    machine = after(*calls)
    with pytest.raises(RuntimeError, match=f"A defect of azureml_elastic: .* {machine.state.value!r}"):
        CALLS[impossible](machine)


def test_no_order_of_calls_loses_what_was_deferred_or_hands_a_part_of_a_step_over():
    """The invariants, over random calls that are possible."""
    rng = random.Random(35)
    reached = set()
    for _ in range(300):
        machine, complete, waits = StepMachine(), True, False
        for _ in range(40):
            name = rng.choice([*CALLS])
            before = machine.state
            if name == "finish" and rng.random() < 0.9:
                continue
            try:
                CALLS[name](machine)
            except RuntimeError:
                assert machine.state is before
                continue
            reached.add(machine.state)
            counts = before in (BETWEEN, ACCUMULATING, DEFERRED, STEPPED)
            if name == "update" and counts:
                complete = False
            elif name.startswith(("complete", "restored")) or (name == "revert update" and before is STEPPED):
                complete = True
            elif name == "restore":
                complete = False
            if name in ("complete, code follows", "defer") or (name == "complete" and waits):
                waits = True
            elif name in ("end code", "finish"):
                waits = False
            assert machine.pending == waits
            assert machine.whole == (complete and machine.state is not OVER)
            assert machine.state is not DEFERRED or waits
            assert machine.state not in (BETWEEN, ACCUMULATING, AT_BOUNDARY) or not waits
    assert reached == set(StepState)
