"""The state of optimizers: taken and restored without a step, under names that no wrapper changes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from azureml_elastic.checkpoint.state.compatibility import kinds_of
from azureml_elastic.checkpoint.state.tracked import canonical_names
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.errors import UsageError


class Counting(torch.optim.Optimizer):
    """Plain descent with a counter, and a nested state that its first step makes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0, "mode": "train"})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                self.state[parameter].setdefault("kept", {"mean": torch.zeros_like(parameter), "norms": []})
                kept = self.state[parameter]["kept"]
                kept["mean"].lerp_(parameter.grad, 0.5)
                kept["norms"] = [*kept["norms"], float(parameter.grad.norm())]
                parameter.sub_(parameter.grad, alpha=group["lr"])


class Quantized(torch.optim.Optimizer):
    """Momentum in eight bits: indices into a map of values that parameters share, and a scale for each row."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.values = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    indices = torch.full_like(parameter, 128, dtype=torch.uint8)
                    state.update(state1=indices, qmap1=self.values, absmax1=torch.ones(len(parameter)))
                scale = state["absmax1"].view(-1, *[1] * (parameter.dim() - 1))
                momentum = (state["qmap1"][state["state1"].int()] * scale).lerp_(parameter.grad.float(), 0.1)
                state["absmax1"] = momentum.abs().reshape(len(parameter), -1).amax(1).clamp(min=1e-9)
                scale = state["absmax1"].view_as(scale)
                state["state1"] = torch.bucketize(momentum / scale, state["qmap1"][:-1]).to(torch.uint8)
                parameter.sub_(momentum, alpha=group["lr"])


class Compiled(nn.Module):
    """A wrapper with the name for its module that ``torch.compile`` has."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3)


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def half_network():
    return network().bfloat16()


def train(model, optimizer, steps=3):
    for step in range(steps):

        def closure(step=step):
            optimizer.zero_grad()
            x = torch.full((2, 3), 1.0 + step, dtype=optimizer.param_groups[0]["params"][0].dtype)
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize(
    ("make", "network"),
    [(Counting, network), (lbfgs, network), (fused, network), (Quantized, network), (Quantized, half_network)],
)
def test_a_new_optimizer_continues_and_is_not_made_to_step(make, network):
    """Its state has the types that it had: torch would load numbers of eight bits as those of the parameters."""
    model = network()
    old, optimizer = train(model, make(model.parameters()))
    plain, tensors = copy.deepcopy(TrackedState({"model": old, "optimizer": optimizer}).collect(is_main=True))
    again = network()
    new = make(again.parameters())
    steps = []
    new.register_step_post_hook(lambda *_: steps.append(1))
    state = TrackedState({"model": again, "optimizer": new})
    assert state.collect(is_main=True)[0]["optimizer"]["state"] == {}
    assert state.check("here", plain, state.classes, kinds_of(tensors)) is None
    state.restore(plain, tensors)
    assert not steps
    train(old, optimizer)
    train(again, new)
    for one, other in zip(old.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert new.param_groups[0].get("steps") == optimizer.param_groups[0].get("steps")


class Precise(torch.optim.Optimizer):
    """Momentum in 32 bits, whatever the parameters have, and a counter of eight bits for each number."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["count"] = torch.zeros_like(parameter, dtype=torch.uint8)
            if parameter.grad is not None:
                state["momentum"].lerp_(parameter.grad.float(), 0.1)
                state["count"].add_(1)


@pytest.mark.shards_on_cpus
def test_a_sharded_optimizers_state_keeps_its_types(process_group):
    def make():
        model = half_network()
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        return model, Precise(model.parameters())

    model, optimizer = train(*make())
    plain, tensors = TrackedState({"model": model, "optimizer": optimizer}).collect(is_main=True)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    again, new = make()
    TrackedState({"model": again, "optimizer": new}).restore(plain, tensors)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        for name, value in optimizer.state[one].items():
            found = new.state[other][name]
            assert found.dtype == value.dtype
            assert torch.equal(found.to_local(), value.to_local())


def test_an_optimizer_of_several_models_continues():
    """It has the parameters of all, a part of each: no name of a model is one that a module cannot have."""

    def make():
        models = {name: network() for name in ("train", "other", "frozen")}
        for parameter in models["other"][0].parameters():
            parameter.requires_grad_(False)
        kept = itertools.chain(*(models[name].parameters() for name in ("train", "other")))
        optimizer = torch.optim.AdamW([parameter for parameter in kept if parameter.requires_grad])
        return models, optimizer, TrackedState({**models, "optimizer": optimizer})

    def step(models, optimizer):
        train(lambda x: models["other"](models["train"](x)[:, :1].expand(2, 3)), optimizer)

    models, optimizer, state = make()
    step(models, optimizer)
    plain, tensors = copy.deepcopy(state.collect(is_main=True))
    assert {"train.0.weight", "train.1.bias", "other.1.weight"} <= set(plain["optimizer"]["state"])
    again, new, state = make()
    assert state.check("here", plain, state.classes, kinds_of(tensors)) is None
    state.restore(plain, tensors)
    step(models, optimizer)
    step(again, new)
    for name, model in models.items():
        for one, other in zip(model.parameters(), again[name].parameters(), strict=True):
            assert torch.equal(one, other)


def test_an_optimizer_with_a_parameter_of_no_model_is_refused():
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))])
    with pytest.raises(UsageError, match=r"do not all belong to tracked modules.* tracked are \['model'\]"):
        TrackedState({"model": model, "optimizer": optimizer})


def test_a_new_optimizer_is_refused_the_state_of_another_shape():
    """The optimizer has no state yet that would show it."""
    model = network()
    old, optimizer = train(model, torch.optim.AdamW(model.parameters()))
    plain, tensors = TrackedState({"model": old, "optimizer": optimizer}).collect(is_main=True)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 7))
    state = TrackedState({"model": other, "optimizer": torch.optim.AdamW(other.parameters())}, partial=["model"])
    refusal = state.check("here", plain, state.classes, kinds_of(tensors))
    assert "optimizer: 1.bias had the shape [2], and now [7]" in str(refusal)


def test_wrappers_leave_no_trace_in_names(process_group):
    parts = {name: nn.parallel.DistributedDataParallel(Compiled(network())) for name in ("a", "b")}
    for owner, expected in ((nn.ModuleDict(parts), {"a.0.weight", "b.1.bias"}), (parts["a"], {"0.weight"})):
        names = canonical_names(owner).values()
        assert expected <= set(names)
        assert not any("module" in name or "_orig_mod" in name for name in names)
