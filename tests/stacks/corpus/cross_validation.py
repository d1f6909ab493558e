"""Trains a new model on each of two folds of the data."""

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
torch.manual_seed(15)
points = toy.Points(240)
steps, tested = 0, []
for fold in range(2):
    validation = list(range(fold * 80, fold * 80 + 80))
    training = [index for index in range(len(points)) if index not in validation]
    train_dataloader = DataLoader(torch.utils.data.Subset(points, training), shuffle=True, batch_size=4)
    test_dataloader = DataLoader(torch.utils.data.Subset(points, validation), batch_size=4)
    model = toy.perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=10 * accelerator.num_processes)
    model, optimizer, train_dataloader, test_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, test_dataloader, lr_scheduler
    )
    for _ in range(2):
        model.train()
        for x, y in train_dataloader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            steps += 1
    model.eval()
    with torch.no_grad():
        tested.append(sum(len(accelerator.gather_for_metrics(model(x))) for x, y in test_dataloader))
if accelerator.is_main_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"tested": tested}))
accelerator.end_training()
