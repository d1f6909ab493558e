"""Keeps averages beside its model without tracking them, and prints their norms as JSON at the end."""

import json
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train


class Average:
    """A moving average whose weight depends on the number of its updates."""

    def __init__(self, module):
        self.shadow = [each.detach().clone() for each in module.parameters()]
        self.updates = 0
        self.history = []

    @torch.no_grad()
    def step(self, module):
        self.updates += 1
        self.history.append(self.updates % 7)
        decay = min(0.95, (1 + self.updates) / (10 + self.updates))
        for average, each in zip(self.shadow, module.parameters(), strict=True):
            average.mul_(decay).add_(each, alpha=1 - decay)


def fit(run, net, average, samples):
    queue = torch.zeros(8, 8)  # after run.track()
    model = run.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    run.track(model=model, optimizer=optimizer)
    at_ends = torch.zeros_like(net.weight)
    loader = run.loader(TensorDataset(samples, samples.sum(1, keepdim=True)), global_batch_size=8, seed=0)
    for _ in run.epochs(2):
        for x, y in loader:
            queue.copy_(queue.roll(1, 0))
            queue[0] = net.weight[0].detach()
            run.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            average.step(net)
            time.sleep(0.03)
            run.commit()
        at_ends.lerp_(net.weight.detach(), 0.5)
    run.finish()
    return queue, at_ends


run = train.start()
torch.manual_seed(0)
net = nn.Linear(8, 1)
average = Average(net)
queue, at_ends = fit(run, net, average, torch.randn(240, 8))
if run.is_main:
    order = torch.arange(8.0)[:, None]
    norms = [float(each.norm()) for each in (average.shadow[0], queue * order, at_ends, net.weight.detach())]
    print("kept " + json.dumps({"norms": norms, "updates": average.updates, "history": average.history}), flush=True)
