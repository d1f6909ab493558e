"""What the processes of the tests do: they train with a DeepSpeed engine."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from azureml_elastic import train
from azureml_elastic.errors import UsageError
from tests.support.train.workers import dataset, policy

GLOBAL_BATCH = 10

LOSES_GRADIENTS = not hasattr(DeepSpeedZeroOptimizer, "_record_offload_copy")
"""Whether this release does, where it accumulates them and offloads the optimizer."""


class Net(nn.Module):
    """With a weight that is used twice, one that is frozen, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 7)
        self.frozen.requires_grad_(False)
        self.body = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.body.weight
        self.head = nn.Linear(7, 3)
        self.register_buffer("batches", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.batches += 1
        x = x.to(self.head.bias.dtype)
        return self.head(torch.tanh(self.again(torch.tanh(self.body(torch.tanh(self.frozen(x))))))).float()


def config(stage, kind=None, offload=False):
    adam = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    steps = {"total_num_steps": 100, "warmup_num_steps": 5, "warmup_type": "linear"}
    sharding = {"stage": stage, "stage3_param_persistence_threshold": 10}
    found = {
        "zero_optimization": sharding,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": adam,
        "scheduler": {"type": "WarmupDecayLR", "params": steps},
        "gradient_clipping": 1.0,
    }
    if offload:
        sharding["offload_optimizer"] = {"device": "cpu"}
    if kind is not None:
        found[kind] = {"enabled": True}
    if kind == "fp16":
        found[kind] |= {"initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1}  # too much for six steps
    return found


def make(run, stage, kind=None, offload=False, seed=0, accumulation=None, micro=None):
    torch.manual_seed(seed)
    model = Net()
    sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro}
    settings = run.deepspeed_config(config(stage, kind, offload), **sizes)
    if accumulation is not None:
        settings |= {
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": settings["train_micro_batch_size_per_gpu"] * accumulation * run.world_size,
        }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=settings)[0]


def fit(folder, until, stage, kind=None, offload=False, micro=None):
    """Train up to a number of steps; return the loss of each, and what the engine has then."""
    run = train.start(policy(folder))
    engine = make(run, stage, kind, offload, seed=run.rank if until == 0 else 0, micro=micro)
    run.track(engine=engine)
    began, losses, total = describe(engine), [], 0.0
    loader = run.loader(dataset(), global_batch_size=GLOBAL_BATCH, micro_batch_size=micro)
    for _ in run.epochs(1_000):
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x.float()), y)
            run.backward(loss)
            total += loss.detach().double() * len(y)
            if run.accumulating:
                continue
            engine.step()
            dist.all_reduce(total)
            losses.append(total.item() / GLOBAL_BATCH)
            total = 0.0
            run.commit()
            if run.steps == until:
                run.finish()
                return losses, began, describe(engine)
    raise AssertionError


def describe(engine):
    """Return what the engine has, besides the weights in 32 bits: as the model and as DeepSpeed's own tools see it."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    parameters = list(engine.module.parameters())
    weights = []
    for parameter in parameters:  # each by itself: of several, DeepSpeed waits for the last one alone
        with zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            weights.append(parameter.detach().double().flatten().tolist())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if engine.global_steps > engine.skipped_steps and engine.zero_optimization_stage():
        kept = [
            read(parameter, *key).flatten().tolist()
            for parameter in trained
            for read, key in (
                (safe_get_full_fp32_param, ()),
                (safe_get_full_optimizer_state, ("exp_avg",)),
                (safe_get_full_optimizer_state, ("exp_avg_sq",)),
            )
        ]
    else:
        kept = None
    return {
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr(),
        "batches": engine.module.batches.tolist(),
        "scale": None if scaler is None else {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)},
        "weights": weights,
        "kept": kept,
    }


def refused(folder, stage, accumulation=None, track="engine", micro=None):
    """Return what is said to a script that does it wrong."""
    run = train.start(policy(folder))
    engine = make(run, stage, accumulation=accumulation)
    parts = {"engine": engine}
    if track == "model":
        parts["model"] = engine.module
    try:
        run.track(**parts)
        for x, y in run.loader(dataset(), global_batch_size=GLOBAL_BATCH, micro_batch_size=micro):
            run.backward(nn.functional.cross_entropy(engine(x.float()), y))
            break
    except UsageError as error:
        return str(error)
    return None
