"""What collectives have returned is known again, by the batch and the call."""

from __future__ import annotations

import pytest
import torch

from azureml_elastic.train.integrations.script_loop.collective_results import LARGEST, CollectiveResults


def results_of(*batches, results=None):
    """Note the results of batches: pairs of the place and what its collectives return."""
    results = results or CollectiveResults()
    for place, returned in batches:
        results.train(*place)
        for each in returned:
            results.note(each)
    return results


def again(results, place, calls=1):
    results.repeat(*place)
    return [results.next() for _ in range(calls)]


def restored(results):
    other = results_of(((7, 7), [torch.ones(3)]))
    other.load_state_dict(results.state_dict())
    return other


@pytest.mark.parametrize("result", [
    torch.tensor([0.1, 0.2]), torch.tensor(3.5), torch.tensor([1 << 40]), torch.tensor([1.5], dtype=torch.bfloat16),
    torch.tensor(True), torch.empty(0),
], ids=lambda result: f"{result.dtype}-{result.dim()}")  # fmt: skip
def test_a_result_comes_back_in_its_type_and_shape(result):
    (found,) = again(restored(results_of(((0, 0), [result]))), (0, 0))
    assert found.dtype == result.dtype
    assert found.shape == result.shape
    assert torch.equal(found, result)


def test_each_call_of_each_batch_has_its_own():
    results = results_of(((0, 0), [torch.tensor(1), torch.tensor(2)]), ((0, 2), [torch.tensor(3)]),
                         ((1, 0), [torch.tensor(4)]))  # fmt: skip
    for known in (results, restored(results)):
        assert again(known, (0, 0), 3) == [1, 2, None]
        assert again(known, (0, 1)) == [None]
        assert again(known, (0, 2)) == [3]
        assert again(known, (1, 0)) == [4]
        assert again(known, (2, 0)) == [None]


def test_what_is_too_large_is_not_kept_but_counted():
    large, matrix = torch.zeros(LARGEST + 1), torch.zeros(2, 2)
    results = results_of(((0, 0), [large, torch.tensor(1.5), matrix, torch.tensor(2.5)]))
    assert again(restored(results), (0, 0), 4) == [None, 1.5, None, 2.5]


def test_a_batch_that_is_trained_again_replaces_what_was_known_of_it_and_of_later_ones():
    results = results_of(*(((0, batch), [torch.tensor(batch)]) for batch in range(4)), ((1, 0), [torch.tensor(9)]))
    for known in (restored(results), results):
        results_of(((0, 2), [torch.tensor([5.0, 6.0])]), results=known)
        assert again(known, (0, 1)) == [1]
        assert again(known, (0, 2))[0].tolist() == [5.0, 6.0]
        assert again(known, (0, 3)) == again(known, (1, 0)) == [None]


def test_what_the_script_does_with_a_result_changes_nothing():
    result = torch.tensor([1.0, 2.0])
    results = results_of(((0, 0), [result]))
    result.mul_(3)
    assert again(results, (0, 0))[0].tolist() == [1.0, 2.0]


def test_many_results_are_read_together():
    results = results_of(*(((0, batch), [torch.tensor([batch, -batch])]) for batch in range(2500)))
    assert [again(results, (0, batch))[0].tolist() for batch in (0, 1234, 2499)] == [
        [0, 0], [1234, -1234], [2499, -2499]
    ]  # fmt: skip
