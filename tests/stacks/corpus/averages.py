"""Keeps averages, a teacher and queues beside its model that it neither prepares nor registers, as most scripts do."""

import argparse
import copy
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--direct", action="store_true", help="reduce by torch, as libraries of metrics do")
parser.add_argument(
    "--broadcast", action="store_true", help="send by torch, so that some ranks have it and others wait"
)
parser.add_argument("--reduce_first", action="store_true", help="reduce by torch before the update, too")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--die_before_reducing", type=int, nargs="*", default=[], help="batches in which rank 0 dies once")
args = parser.parse_args()


class Average:
    """A moving average in the shape of that of diffusers."""

    def __init__(self, parameters):
        self.shadow = [each.detach().clone() for each in parameters]
        self.count = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def step(self, parameters):
        self.count += 1
        for average, each in zip(self.shadow, parameters, strict=True):
            average.sub_(0.1 * (average - each))


class Callback:
    """A callback with an average of its own."""

    def __init__(self, model):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, model):
        self.average.update_parameters(model)


def moving(weight):
    """Return a function that keeps an average by itself."""
    kept = torch.zeros_like(weight)
    return lambda: kept.lerp_(weight.detach(), 0.2)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(6)
    model = net = toy.perceptron()
    train_dataloader = DataLoader(toy.Points(), shuffle=True, batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ema, callbacks, teacher = Average(net.parameters()), [Callback(net)], copy.deepcopy(net)
    by_name = {name: each.detach().clone() for name, each in net.state_dict().items()}
    by_data = [each.detach().clone() for each in net.parameters()]
    weights = [each.detach() for each in net.parameters() if each.dim() == 2]
    closure, queue, momentum = moving(weights[0]), torch.zeros(5, weights[0].shape[1]), torch.zeros_like(weights[0])
    epochs = AveragedModel(net)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    steps = 0
    for _ in range(2):
        for x, y in train_dataloader:
            momentum.mul_(0.9).add_(weights[0])  # before the update, as the key encoder of MoCo
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if args.reduce_first:
                    torch.distributed.all_reduce(loss.detach().clone())
                optimizer.step()
                optimizer.zero_grad()
            ema.step(net.parameters())
            if steps + 1 in args.die_before_reducing:
                toy.die_once(accelerator, args.output_dir / f"died_{steps}")
            # The step counts already.
            if args.broadcast:
                torch.distributed.broadcast(loss.detach().clone(), src=1)
            else:
                (torch.distributed.all_reduce if args.direct else accelerator.reduce)(loss.detach().clone())
            for callback in callbacks:
                callback.on_step_end(net)
            with torch.no_grad():
                for own, each in zip(teacher.parameters(), net.parameters(), strict=True):
                    own.mul_(0.9).add_(each, alpha=0.1)
                for name, each in net.state_dict().items():
                    by_name[name].lerp_(each, 0.1)
                for own, each in zip(by_data, net.parameters(), strict=True):
                    own.data.mul_(0.8).add_(each.data, alpha=0.2)
                queue[steps % 5] = weights[0][0]
            closure()
            steps += 1
        epochs.update_parameters(net)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        kept = {
            "ema": ema.shadow,
            "callback": callbacks[0].average.module.parameters(),
            "teacher": teacher.parameters(),
            "by_name": by_name.values(),
            "by_data": by_data,
            "closure": [closure()],
            "queue": [queue[0]],
            "momentum": [momentum],
            "epochs": epochs.module.parameters(),
        }
        norms = {name: float(torch.cat([each.detach().flatten() for each in kept[name]]).norm()) for name in kept}
        counts = {"completed_steps": steps, "updates": [int(ema.count), int(callbacks[0].average.n_averaged)]}
        counts["epochs_averaged"] = int(epochs.n_averaged)
        (args.output_dir / "all_results.json").write_text(json.dumps({**norms, **counts}))


main()
