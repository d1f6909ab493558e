"""Which tensors are state: by their changes between two moments, and by all ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from azureml_elastic.train.found.comparison import Change, Comparison, _on_device, agreed, checksums
from azureml_elastic.train.found.search import Found, FoundTensor


def found(local=False, buffer=False, **tensors):
    return Found(
        [FoundTensor(path, each, local=local, buffer=buffer) for path, each in tensors.items()], (), complete=True
    )


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2050,)])
def test_what_is_written_to_is_state(kind, shape):
    comparison = Comparison()
    kept, other = torch.zeros(shape, dtype=kind), torch.zeros(shape, dtype=kind)
    comparison.compare(found(kept=kept, other=other), set())
    kept.data.fill_(1)
    assert [*comparison.compare(found(kept=kept, other=other), set()).state] == ["kept"]
    # A change counts from then on, until all ranks know it.
    assert [*comparison.compare(found(kept=kept, other=other), set()).state] == ["kept"]
    assert not comparison.compare(found(kept=kept, other=other), {"kept"}).state


def test_a_tensor_keeps_the_path_by_which_it_was_found_first():
    comparison, kept = Comparison(), torch.zeros(2)
    comparison.compare(found(first=kept), set())
    kept += 1
    assert [*comparison.compare(found(other=kept), set()).state] == ["first"]


def test_what_is_bound_anew_is_named_after_the_second_time_and_is_no_state():
    comparison, tensors = Comparison(), [torch.full((2,), float(index)) for index in range(4)]
    named = [[each.path for each in comparison.compare(found(a=each), set()).rebound] for each in tensors]
    assert named == [[], [], ["a"], ["a"]]
    assert not comparison.compare(found(a=tensors[3]), set()).state
    assert not comparison.compare(found(a=torch.zeros(5)), set()).rebound  # of another shape


def test_a_buffer_that_is_bound_anew_is_state():
    comparison = Comparison()
    comparison.compare(found(buffer=True, centre=torch.zeros(2)), set())
    assert [*comparison.compare(found(buffer=True, centre=torch.zeros(2)), set()).state] == ["centre"]


def test_what_is_too_large_is_named_once_it_changes(monkeypatch):
    monkeypatch.setattr("azureml_elastic.train.found.comparison._FIRST_BYTES", 100)
    monkeypatch.setattr("azureml_elastic.train.found.comparison._LATER_BYTES", 100)
    comparison, large, small = Comparison(), torch.zeros(1000), torch.zeros(3)
    comparison.compare(found(large=large, small=small), set())
    small += 1
    changes = comparison.compare(found(large=large, small=small), set())
    assert ([*changes.state], changes.too_large) == (["small"], [])
    large += 1
    assert comparison.compare(found(large=large, small=small), set()).too_large == ["large"]


def test_what_does_not_fit_into_a_comparison_has_its_turn_in_the_next(monkeypatch):
    monkeypatch.setattr("azureml_elastic.train.found.comparison._FIRST_BYTES", 100)
    monkeypatch.setattr("azureml_elastic.train.found.comparison._LATER_BYTES", 100)
    comparison, tensors = Comparison(), {name: torch.zeros(20) for name in "abc"}
    for _ in range(3):
        comparison.compare(found(**tensors), set())
    for each in tensors.values():
        each.data.add_(1)
    seen = set()
    for _ in range(3):
        seen |= comparison.compare(found(**tensors), set()).state.keys()
    assert seen == {*"abc"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_checksum_of_a_device_sees_values_that_move(kind):
    tensor = torch.zeros(3000, dtype=kind)
    tensor[5] = 1
    sums = {int(_on_device(tensor.roll(shift))) for shift in (0, 1, 700, 1024, 2048)}
    assert len(sums) == 5


def test_views_and_conjugates_have_the_checksum_of_their_values():
    base = torch.arange(12.0).reshape(3, 4)
    assert checksums([base.T]) == checksums([base.T.clone()])
    values = torch.ones(2, dtype=torch.complex64) * 1j
    assert checksums([values.conj()]) == checksums([values.conj().resolve_conj().clone()])


def test_state_is_what_all_ranks_have_changed_alike():
    waited = Counter()
    first = {"same": Change(1, buffer=False), "own": Change(2, buffer=False), "buffer": Change(3, buffer=True)}
    second = {"same": Change(1, buffer=False), "own": Change(4, buffer=False), "buffer": Change(5, buffer=True)}
    assert agreed([first, second], waited) == (["buffer", "same"], ["own"])
    alone = {"main": Change(1, buffer=False)}
    assert agreed([alone, {}], waited) == ([], [])
    assert agreed([alone, {}], waited) == ([], ["main"])
