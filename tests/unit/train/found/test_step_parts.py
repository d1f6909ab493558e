"""A part of a step is undone, by what earlier ones have changed."""

from __future__ import annotations

import torch

from azureml_elastic.train.found import step_parts
from azureml_elastic.train.found.step_parts import StepPart


def test_a_part_that_is_broken_off_leaves_what_was_before_it():
    part, queue, other = StepPart(), torch.zeros(3), torch.zeros(2)
    tensors = {"queue": queue, "other": other}
    for step in range(3):
        part.begin(tensors)
        queue.data.add_(1)  # which no version counter sees
        if step < 2:
            part.end()
            other += 1
    assert part.undo() == []
    assert (queue.tolist(), other.tolist()) == ([2.0] * 3, [2.0] * 2)
    assert part.undo() == []


def test_a_part_that_is_broken_off_at_once_leaves_what_was_before_it():
    part, queue, late, unchanged = StepPart(), torch.zeros(3), torch.zeros(2), torch.zeros(1)
    tensors = {"queue": queue, "unchanged": unchanged}
    for _ in range(2):
        part.begin(tensors)
        queue += 1
        part.end()
    part.begin({**tensors, "late": late})  # which is known to be state from now on
    queue += 1
    late.data.add_(1)
    assert part.undo() == []
    assert (queue.tolist(), late.tolist()) == ([2.0] * 3, [0.0] * 2)


def test_what_is_large_is_copied_once_it_is_known_to_change(monkeypatch):
    monkeypatch.setattr(step_parts, "_UNSEEN_BYTES", 10)
    part, queue, number = StepPart(), torch.zeros(3), torch.zeros(())
    tensors = {"queue": queue, "number": number}
    part.begin(tensors)
    queue += 1
    number += 1
    assert part.undo() == ["queue"]
    assert (queue.tolist(), number.item()) == ([1.0] * 3, 0.0)


def test_what_changes_for_the_first_time_where_it_is_broken_off_is_named():
    part, queue = StepPart(), torch.zeros(3)
    part.begin({"queue": queue})
    part.end()
    part.begin({"queue": queue})
    queue += 1
    assert part.undo() == ["queue"]


def test_a_change_that_comes_late_is_learned():
    part, queue = StepPart(), torch.zeros(3)
    for step in range(8):
        part.begin({"queue": queue})
        if step > 5:
            queue += 1
    assert part.undo() == []
    assert queue.tolist() == [1.0] * 3


def test_tensors_of_inference_mode_are_undone_too():
    part = StepPart()
    with torch.inference_mode():
        queue = torch.zeros(3)
    for step in range(3):
        part.begin({"queue": queue})
        with torch.inference_mode():
            queue += 1
        if step < 2:
            part.end()
    assert part.undo() == []
    assert queue.tolist() == [2.0] * 3
