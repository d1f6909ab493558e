"""Which optimizers are expected in a step of a script's loop."""

from azureml_elastic.train.integrations.script_loop.script_steps import StepUpdates

CRITIC, GENERATOR = object(), object()


def train(updates, *optimizers, times=1):
    for _ in range(times):
        for optimizer in optimizers:
            updates.note(optimizer, prepared=2)
        updates.end_step()


def test_the_second_of_two_is_missing_until_it_has_stepped():
    updates = StepUpdates()
    assert not updates.missing
    for _ in range(2):  # the first step knows the prepared ones alone, the second what has stepped before
        updates.note(CRITIC, prepared=2)
        assert updates.missing
        updates.note(GENERATOR, prepared=2)
        assert not updates.missing
        updates.end_step()


def test_one_that_steps_in_every_fifth_step_is_expected_in_each():
    updates = StepUpdates()
    train(updates, CRITIC, GENERATOR)
    train(updates, CRITIC, times=4)
    updates.note(CRITIC, prepared=2)
    assert updates.missing


def test_one_that_steps_no_more_is_expected_no_more():
    updates = StepUpdates()
    train(updates, CRITIC, GENERATOR)
    train(updates, CRITIC, times=64)
    updates.note(CRITIC, prepared=2)
    assert not updates.missing


def test_a_restarted_script_learns_from_the_steps_that_it_repeats():
    updates = StepUpdates()
    updates.expect(CRITIC)
    updates.note(CRITIC, prepared=2)
    assert not updates.missing
    updates.expect(GENERATOR)
    assert updates.missing
