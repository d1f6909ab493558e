"""A script that has changed since its checkpoint: refused before anything is restored, or restored in part."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from azureml_elastic import train
from azureml_elastic.errors import UsageError
from tests.support.train import workers

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def network(width=3, classes=2, extra=False):
    torch.manual_seed(width + classes)
    layers = [nn.Linear(4, width), nn.Linear(width, classes)]
    return nn.Sequential(*layers, *([nn.Linear(classes, 1)] if extra else []))


def save(folder, model=None, make=lambda parameters: ADAMW(parameters, lr=0.1), schedule=None, steps=2):
    """Train and save a checkpoint, and return the model and the optimizer."""
    with train.start(workers.policy(folder)) as run:
        plain = model or network()
        model = run.wrap(plain)
        optimizer = make([each for each in model.parameters() if each.requires_grad])
        others = {} if schedule is None else {"scheduler": schedule(optimizer)}
        run.track(model=model, optimizer=optimizer, **others)
        for _ in range(steps):
            model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
    return plain, optimizer


def resume(folder, model, optimizer, **options):
    with train.start(workers.policy(folder)) as run:
        run.track(model=model, optimizer=optimizer, **options)
        return run.steps


def refused(folder, model, optimizer, match, **options):
    """Check that the script is refused, and return the message."""
    with train.start(workers.policy(folder)) as run, pytest.raises(UsageError, match=match) as raised:
        run.track(model=model, optimizer=optimizer, **options)
    return str(raised.value)


def copy_of(model, optimizer):
    state = optimizer.state_dict()["state"]
    return [each.detach().clone() for each in model.parameters()], {key: len(value) for key, value in state.items()}


def frozen(model):
    model[0].weight.requires_grad_(False)
    return model


def trained(model):
    return [each for each in model.parameters() if each.requires_grad]


def groups(model):
    return [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 0.5}]


CHANGES = {
    "optimizer": (
        lambda: (model := network(), SGD(model.parameters(), lr=0.1)),
        ["optimizer: it was a AdamW, and is a SGD now"],
    ),
    "type": (
        lambda: (model := network().bfloat16(), ADAMW(model.parameters())),
        ["model: 0.bias, 0.weight, 1.bias and 1 more were float32, and now bfloat16"],
    ),
    "width": (
        lambda: (model := network(width=5), ADAMW(model.parameters())),
        ["model: 0.bias was float32[3], and now float32[5]", "1.weight was float32[2, 3], and now float32[2, 5]"],
    ),
    "another layer": (
        lambda: (model := network(extra=True), ADAMW(model.parameters())),
        ["model: the checkpoint does not hold 2.bias, 2.weight"],
    ),
    "a layer less": (
        lambda: (model := nn.Sequential(nn.Linear(4, 3)), ADAMW(model.parameters())),
        [
            "model: the script does not have 1.bias, 1.weight",
            "optimizer: it does not optimize 1.bias, 1.weight any more",
        ],
    ),
    "frozen": (
        lambda: (model := frozen(network()), ADAMW(trained(model))),
        ["optimizer: it does not optimize 0.weight any more"],
    ),
    "groups": (
        lambda: (model := network(), ADAMW(groups(model))),
        ["optimizer: it had 1 parameter groups, and has 2 now"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_named_before_anything_is_restored(change, tmp_path):
    save(tmp_path)
    make, expected = CHANGES[change]
    model, optimizer = make()
    before = copy_of(model, optimizer)[0]
    text = refused(tmp_path, model, optimizer, "does not fit this script; nothing was restored")
    for sentence in expected:
        assert sentence in text
    assert "run.track(..., partial=[" in text
    assert all(map(torch.equal, before, model.parameters()))
    again, optimizer = network(), None
    assert resume(tmp_path, again, ADAMW(again.parameters())) == 2, "the checkpoint is still there"


def test_another_scheduler_is_refused(tmp_path):
    save(tmp_path, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5))
    model = network()
    optimizer = ADAMW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    refused(tmp_path, model, optimizer, "it was a StepLR, and is a ExponentialLR now", scheduler=scheduler)
    assert resume(tmp_path, model, optimizer, scheduler=scheduler, partial=["scheduler"]) == 2
    assert scheduler.gamma == 0.9
    assert not hasattr(scheduler, "step_size")


def test_a_new_head_keeps_the_rest(tmp_path, caplog):
    old, old_optimizer = save(tmp_path)
    model = network(classes=7)
    optimizer = ADAMW(model.parameters())
    head = model[1].weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        assert resume(tmp_path, model, optimizer, partial=["model", "optimizer"]) == 2
    assert "restored in part; new are model/1.bias, model/1.weight, optimizer/state/1.bias" in caplog.text
    assert torch.equal(model[0].weight, old[0].weight)
    assert torch.equal(model[1].weight, head)
    kept, new = optimizer.state[model[0].weight], optimizer.state.get(model[1].weight, {})
    assert torch.equal(kept["exp_avg"], old_optimizer.state[old[0].weight]["exp_avg"])
    assert kept["step"] == 2
    assert not new, "it begins with the next gradient"


def test_weights_of_another_type_are_cast(tmp_path):
    old, _ = save(tmp_path)
    model = network().bfloat16()
    optimizer = ADAMW(model.parameters())
    resume(tmp_path, model, optimizer, partial=["model", "optimizer"])
    assert torch.equal(model[0].weight, old[0].weight.bfloat16())
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[model[0].weight]["step"] == 2


def test_another_optimizer_begins_anew(tmp_path, caplog):
    old, _ = save(tmp_path)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.7, momentum=0.9)
    with caplog.at_level(logging.WARNING):
        assert resume(tmp_path, model, optimizer, partial=["optimizer"]) == 2
    assert torch.equal(model[0].weight, old[0].weight)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert not any(optimizer.state.values())


def test_frozen_parts_keep_the_state_of_the_others(tmp_path):
    old, old_optimizer = save(tmp_path)
    model = frozen(network())
    optimizer = ADAMW(trained(model))
    resume(tmp_path, model, optimizer, partial=["optimizer"])
    assert torch.equal(model[0].weight, old[0].weight)
    assert torch.equal(optimizer.state[model[1].bias]["exp_avg"], old_optimizer.state[old[1].bias]["exp_avg"])


def test_parts_that_have_no_gradient_at_first_and_state_that_comes_later_are_no_change(tmp_path):
    model = network()
    model[0].requires_grad_(False)
    save(tmp_path, model, lambda _: ADAMW(model.parameters(), lr=0.1))
    again = network()
    assert resume(tmp_path, again, ADAMW(again.parameters())) == 2


def test_a_part_that_is_not_tracked_is_refused(tmp_path):
    model = network()
    refused(tmp_path, model, SGD(model.parameters(), lr=0.1), r"partial=\['head'\] is not among", partial=["head"])
