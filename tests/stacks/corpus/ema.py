"""Keeps a moving average of the weights, registered for checkpoints."""

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
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(6)
model = toy.perceptron()
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
train_dataloader = DataLoader(toy.Points(), shuffle=True, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
accelerator.register_for_checkpointing(average)
steps = 0
for _ in range(2):
    for x, y in train_dataloader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if accelerator.sync_gradients:
            average.update_parameters(accelerator.unwrap_model(model))
            steps += 1
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    weights = torch.cat([each.flatten() for each in average.module.parameters()])
    found = {"completed_steps": steps, "averaged": int(average.n_averaged), "weights": float(weights.norm())}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
