"""What the log says of steps that a script counts once more."""

from __future__ import annotations

from azureml_elastic.train.integrations.script_loop.repeated_steps import RepetitionLog


def test_a_long_repetition_says_how_far_it_is(caplog):
    now = 0.0
    log = RepetitionLog(clock=lambda: now)
    asked = []

    def left():
        asked.append(now)
        return 100_000 - step

    log.begin(100_000)
    for step in range(1, 100_001):
        now = step * 1e-4
        if step == 50_000:
            log.begin(50_000)  # the second epoch of them
        log.go_on(left)
    assert caplog.messages == [
        "The script counts 100,000 steps that are trained already.",
        "The script has counted 50,000 of 100,000 steps that are trained already.",
        "The script has counted 100,000 of 100,000 steps that are trained already.",
    ]
    assert len(asked) == 2


def test_one_step_is_in_the_singular_and_none_not_worth_a_line(caplog):
    log = RepetitionLog()
    log.begin(0)
    log.begin(1)
    assert caplog.messages == ["The script counts 1 step that is trained already."]
