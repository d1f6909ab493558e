"""What the processes of the tests of learning rates do: they train with a DeepSpeed engine."""

from __future__ import annotations

import deepspeed
from deepspeed import zero
from torch import nn

from azureml_elastic import train
from tests.support.train.workers import dataset, flat, network, policy

RATE = 0.01
GLOBAL_BATCH = 10


def make(run, stage, rate):
    """Return an engine whose optimizer steps more than once for a step of the engine: by group, or by sub-group."""
    model = network()
    groups = [{"params": list(model[at].parameters())} for at in (0, 2)]
    settings = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 10},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}},
    }
    config = run.deepspeed_config(settings, global_batch_size=GLOBAL_BATCH)
    return deepspeed.initialize(model=model.float(), model_parameters=groups, config=config)[0]


def base_of(engine):
    """Return what steps in the engine."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def weights_of(engine):
    found = []
    for parameter in engine.module.parameters():  # each by itself: of several, DeepSpeed waits for the last one alone
        with zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found.append(parameter.detach().clone())
    return flat(found).tolist()


def fit(folder, until, stage, batch):
    """Train up to a number of steps, and beside it at the rate of the first of them, and at the own one."""
    run = train.start(policy(folder), batch=batch)
    engine = make(run, stage, RATE)
    run.track(engine=engine)
    others = [make(run, stage, RATE * run.learning_rate_factor), make(run, stage, RATE)]
    applied, between, factors = [], set(), []
    base_of(engine).register_step_pre_hook(lambda base, *_: applied[-1].append(base.param_groups[0]["lr"]))
    loader = run.loader(dataset(60), global_batch_size=GLOBAL_BATCH)
    for _ in run.epochs(1_000):
        for x, y in loader:
            applied.append([])
            factors.append(run.learning_rate_factor)
            run.backward(nn.functional.cross_entropy(engine(x.float()), y))
            engine.step()
            for other in others:
                other.backward(nn.functional.cross_entropy(other(x.float()), y))
                other.step()
            between |= {*engine.get_lr(), *(group["lr"] for group in base_of(engine).param_groups)}
            run.commit()
            if run.steps == until:
                run.finish()
                weights = [weights_of(each) for each in (engine, *others)]
                return {"applied": applied, "between": between, "factors": factors, "weights": weights}
    raise AssertionError
