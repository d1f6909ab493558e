"""Sharded models in the steps that a rank repeats alone: nothing of them waits for another rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from azureml_elastic.checkpoint.state.tracked import OtherState
from azureml_elastic.errors import UsageError
from azureml_elastic.train.integrations.script_loop.batch_parts import CurrentBatch
from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward
from azureml_elastic.train.integrations.script_loop.repeated_steps import FirstForward, RepeatedModels


class Tower(nn.Module):
    """Layers that the model also keeps in an attribute of its own, as some do, with a tied one."""

    def __init__(self, norm):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.norm = norm
        self.order = [(self.layers[0], {"last": self.layers[2]})]
        self.layers[1].forward = self.layers[1].forward  # bound, as integrations and quantized layers have it

    def forward(self, x, scale=1.0):
        ((first, others),) = self.order
        features = others["last"](self.layers[1](first(x)))
        return self.norm(features) * scale, features.mean(1)


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    """The first of two ranks: a collective operation of it alone does not wait, and moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def sharded(norm, output_dtype=None, **precision):
    model, mesh = Tower(norm), init_device_mesh("cpu", (2,))
    fully_shard(model.layers[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype, **precision))


@pytest.fixture
def model():
    return sharded(nn.BatchNorm1d(4))


def collectives(call):
    with CommDebugMode() as counted:
        call()
    return counted.get_total_counts()


@pytest.mark.shards_on_cpus
def test_a_repeated_step_of_a_sharded_model_waits_for_no_rank(model):
    x, hooked = torch.randn(3, 4), []
    model.layers[1].register_forward_hook(lambda *_: hooked.append(1))
    assert collectives(lambda: model(x)) > 0
    before = model.norm.running_mean.clone()
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    outputs = []
    for repeated.certain in (False, True):
        assert collectives(lambda: outputs.append(model(x, scale=2.0))) == 0
    assert [[part.shape for part in each] for each in outputs] == [[(3, 4), (3,)]] * 2
    assert torch.equal(model.norm.running_mean, before)
    assert len(hooked) == 3, "hooks of the script's own run"
    with torch.no_grad():
        assert collectives(lambda: model(x)) > 0, "an evaluation is computed by all ranks"
    repeated.end()
    assert collectives(lambda: model(x)) > 0


def compiles(*_):
    raise AssertionError("compiled code gathers weights")


def test_compiled_layers_and_those_that_are_computed_again_are_copied_as_well(caplog):
    model, mesh = Tower(nn.BatchNorm1d(4)), init_device_mesh("cpu", (2,))
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    fully_shard(model.layers[1], mesh=mesh)
    compiled = fully_shard(torch.compile(model, backend=compiles), mesh=mesh)
    repeated = RepeatedModels([compiled], [].append)
    repeated.begin()
    repeated.certain = True
    assert compiled(torch.ones(3, 4))[0].shape == (3, 4)
    repeated.end()
    assert "are counted slowly" not in caplog.text


@pytest.mark.shards_on_cpus
def test_the_types_are_those_of_the_sharded_model():
    model = sharded(nn.LayerNorm(4), torch.float32, param_dtype=torch.bfloat16)
    expected = model(torch.randn(3, 4))[0].dtype
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    repeated.certain = True
    assert model(torch.randn(3, 4))[0].dtype == expected == torch.float32
    repeated.end()


@pytest.mark.shards_on_cpus
def test_a_model_that_needs_its_weights_is_computed_by_all_ranks_each_time(caplog):
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            if not self.layer.weight.abs().sum():
                raise ZeroDivisionError
            return self.layer(x)

    strict, mesh = Strict(), init_device_mesh("cpu", (2,))
    fully_shard(strict.layer, mesh=mesh)
    fully_shard(strict, mesh=mesh)
    repeated = RepeatedModels([strict], [].append)
    repeated.begin()
    repeated.certain = True
    for _ in range(2):
        assert collectives(lambda: strict(torch.ones(2, 4))) > 0
    assert caplog.text.count("are counted slowly") == 1
    repeated.end()


@pytest.mark.shards_on_cpus
def test_the_state_is_restored_before_the_first_forward_pass_gathers_weights(model):
    begun = []
    first = FirstForward(lambda: begun.append([type(parameter) for parameter in model.parameters()]))
    assert first.replace(model)
    with torch.no_grad():
        assert collectives(lambda: model(torch.randn(3, 4))) > 0
    assert not begun
    model.reshard()
    assert collectives(lambda: model(torch.randn(3, 4))) > 0
    (kinds,) = begun
    assert set(kinds) == {DTensor}


def test_a_larger_batch_is_not_divided(model, caplog):
    divide_forward(model, CurrentBatch(2, torch.device("cpu")))
    assert "forward" not in vars(model)
    assert "takes it whole" in caplog.text


def test_a_part_of_a_sharded_tensor_is_not_taken_for_a_state(model):
    class Average:
        def state_dict(self):
            return {"shadow": [parameter.detach().clone() for parameter in model.parameters()]}

        def load_state_dict(self, state):
            raise NotImplementedError

    with pytest.raises(UsageError, match="holds a part of a sharded tensor, 'average/shadow/0'"):
        OtherState("average", Average()).collect()
