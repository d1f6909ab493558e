"""Trains with L-BFGS, which computes the loss several times in a step."""

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
parser.add_argument("--die_in_update", type=int, help="step in which rank 0 dies once, between two changes of weights")
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(14)
model = toy.perceptron()
train_dataloader = DataLoader(toy.Points(), shuffle=True, batch_size=8)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
steps = 0
for _ in range(4):
    for x, y in train_dataloader:
        calls = []

        def closure(x=x, y=y, calls=calls, step=steps + 1):
            calls.append(None)
            if step == args.die_in_update and len(calls) == 2:
                toy.die_once(accelerator, args.output_dir / "died")
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        steps += 1
if accelerator.is_main_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"completed_steps": steps}))
