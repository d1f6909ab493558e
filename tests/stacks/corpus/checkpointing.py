"""Saves each epoch or every few steps, and begins where the newest folder ends."""

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
torch.manual_seed(4)
model = toy.perceptron(2)
train_dataloader = DataLoader(toy.Points(classes=True), shuffle=True, batch_size=4)
eval_dataloader = DataLoader(toy.Points(30, seed=1, classes=True), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
total = len(train_dataloader) * 2
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / total))
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
overall_step, starting_epoch, resume_step = 0, 0, None
folders = sorted((path for path in args.output_dir.iterdir() if path.is_dir()), key=lambda path: path.stat().st_ctime)
folders = [path for path in folders if path.name.split("_")[0] in ("epoch", "step")]
if folders:
    accelerator.print(f"Resumed from checkpoint: {folders[-1]}")
    accelerator.load_state(str(folders[-1]))
    kind, number = folders[-1].stem.split("_")
    if kind == "epoch":
        starting_epoch = int(number) + 1
        overall_step = starting_epoch * len(train_dataloader)
    else:
        resume_step = overall_step = int(number)
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
for epoch in range(starting_epoch, 2):
    model.train()
    active = train_dataloader
    if epoch == starting_epoch and resume_step is not None:
        active = accelerator.skip_first_batches(train_dataloader, resume_step)
    for x, y in active:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        overall_step += 1
        if overall_step % 8 == 0:
            accelerator.save_state(args.output_dir / f"step_{overall_step}")
    model.eval()
    seen = 0
    for x, y in eval_dataloader:
        with torch.no_grad():
            predictions = model(x).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, y))
        seen += len(references)
    accelerator.save_state(args.output_dir / f"epoch_{epoch}")
if accelerator.is_main_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"overall_step": overall_step, "seen": seen}))
accelerator.end_training()
