"""Takes the batches of a step first, and divides their losses by all of their tokens."""

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

ACCUMULATE = 2
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
torch.manual_seed(7)
model = toy.language_model()
train_dataloader = DataLoader(toy.Blocks(), batch_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
updates, tokens = 0, 0
for _ in range(2):
    iterator = iter(train_dataloader)
    for _ in range(len(train_dataloader) // ACCUMULATE):
        batches = [next(iterator) for _ in range(ACCUMULATE)]
        items = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in batches)
        items = accelerator.gather(items).sum().item()
        tokens += items
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with accelerator.no_sync(model) if not last else accelerator.accumulate(model):
                scores = model(input_ids=batch["input_ids"]).logits[:, :-1]
                labels = batch["labels"][:, 1:]
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / items
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
if accelerator.is_main_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"updates": updates, "tokens": tokens}))
accelerator.end_training()
