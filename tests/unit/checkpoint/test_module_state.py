"""The state of a module: under the names that torch gives it without wrappers, however often it is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from azureml_elastic.checkpoint.state.tracked import ModuleState

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")  # by torch.compile


class Counting(nn.Module):
    """A module with a state that is no tensor, and a weight that grows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def nested():
    """Return a compiled module within others, and beside it a tied and an empty weight."""
    inner, other = nn.Linear(2, 3), nn.Linear(2, 3)
    other.weight = inner.weight
    module = nn.ModuleDict({"first": torch.compile(inner), "tied": other, "norm": nn.BatchNorm1d(3)})
    module.register_parameter("empty", nn.Parameter(torch.empty(0)))
    return module


def misleading():
    """Return a compiled module with a part that is named as the wrapper is."""
    module = nn.Linear(2, 3)
    module.add_module("_orig_mod", nn.Linear(2, 3))
    return torch.compile(module)


@pytest.mark.parametrize("make", [nested, misleading, Counting, lambda: torch.compile(nested())])
def test_names_and_order_are_those_of_torch_each_time(make):
    module = make()
    state = ModuleState("model", module)
    for _ in range(3):
        plain, tensors = state.collect()
        expected = get_model_state_dict(module)
        wanted = {f"model/{name}": each for name, each in expected.items() if isinstance(each, torch.Tensor)}
        assert [*plain] == [*expected]
        assert [*tensors] == [*wanted]
        assert all(tensors[name].data_ptr() == each.data_ptr() for name, each in wanted.items())
        with torch.no_grad():
            next(module.parameters()).add_(1)


def test_what_is_added_to_a_module_is_in_its_state():
    module = nested()
    state = ModuleState("model", module)
    state.collect()
    module.register_buffer("late", torch.ones(2))
    del module["tied"]
    assert "model/late" in state.collect()[1]
    assert [*state.collect()[1]] == [f"model/{name}" for name in get_model_state_dict(module)]
