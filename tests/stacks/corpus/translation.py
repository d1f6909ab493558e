"""Translates: accumulated gradients, steps by a limit within an epoch, predictions padded over the processes."""

import argparse
import json
import math
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(2)
model = toy.translator()
collate = lambda samples: {**(batch := toy.pad(samples)), "labels": batch["input_ids"].flip(1)}  # noqa: E731
train_dataloader = DataLoader(toy.Sentences(), shuffle=True, collate_fn=collate, batch_size=2)
eval_dataloader = DataLoader(toy.Sentences(18, seed=1), collate_fn=collate, batch_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
max_train_steps = 45
lr_scheduler = get_scheduler(
    "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=max_train_steps * accelerator.num_processes
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
updates = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
epochs = math.ceil(max_train_steps / updates)
progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
completed_steps = batches = generated = 0
for _ in range(epochs):
    model.train()
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        batches += 1
        if accelerator.sync_gradients:
            progress_bar.update(1)
            completed_steps += 1
        if completed_steps >= max_train_steps:
            break
    model.eval()
    generated = 0
    for batch in eval_dataloader:
        with torch.no_grad():
            tokens = accelerator.unwrap_model(model).generate(
                batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=3
            )
        tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
        generated += len(accelerator.gather_for_metrics(tokens))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(args.output_dir / "model", save_function=accelerator.save)
    found = {"completed_steps": completed_steps, "batches": batches, "bar": progress_bar.n, "generated": generated}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
