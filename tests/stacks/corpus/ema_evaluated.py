"""Evaluates the moving average of the weights, in their place, at the end of each epoch, as diffusion scripts do."""

import argparse
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--die_in_evaluation", type=int, help="epoch whose evaluation rank 0 does not survive, once")
args = parser.parse_args()


class Average:
    """A moving average that can take the place of the weights."""

    def __init__(self, parameters):
        self.shadow = [each.detach().clone() for each in parameters]
        self.backup = None

    @torch.no_grad()
    def step(self, parameters):
        for average, each in zip(self.shadow, parameters, strict=True):
            average.lerp_(each, 0.1)

    def exchange(self, parameters):
        self.backup = [each.detach().clone() for each in parameters]
        for average, each in zip(self.shadow, parameters, strict=True):
            each.data.copy_(average)

    def restore(self, parameters):
        for own, each in zip(self.backup, parameters, strict=True):
            each.data.copy_(own)
        self.backup = None

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        for average, value in zip(self.shadow, state["shadow"], strict=True):
            average.copy_(value)


accelerator = Accelerator()
torch.manual_seed(16)
model = toy.perceptron()
train_dataloader = DataLoader(toy.Points(), shuffle=True, batch_size=4)
eval_dataloader = DataLoader(toy.Points(40, seed=1), batch_size=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader
)
average = Average(list(model.parameters()))
accelerator.register_for_checkpointing(average)
steps = 0
for epoch in range(2):
    model.train()
    for x, y in train_dataloader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        average.step(list(model.parameters()))
        steps += 1
    model.eval()
    average.exchange(list(model.parameters()))
    found = []
    for number, (x, y) in enumerate(eval_dataloader):
        if epoch == args.die_in_evaluation and number == 2:
            toy.die_once(accelerator, args.output_dir / "died")
        with torch.no_grad():
            each = nn.functional.mse_loss(model(x), y, reduction="none").flatten()
        found.append(accelerator.gather_for_metrics(each))
    average.restore(list(model.parameters()))
if accelerator.is_main_process:
    weights = float(torch.cat([each.flatten() for each in average.shadow]).norm())
    found = {"completed_steps": steps, "weights": weights, "loss": torch.cat(found).mean().item()}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
