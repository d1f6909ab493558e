"""Classifies sentences: steps by a limit or by epochs, a schedule for all processes, metrics without duplicates."""

import argparse
import json
import math
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_scheduler

logger = get_logger(__name__)
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--num_train_epochs", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()

accelerator = Accelerator()
set_seed(7)
model = toy.sequence_classifier()
train_dataloader = DataLoader(toy.Sentences(), shuffle=True, collate_fn=toy.pad, batch_size=4)
eval_dataloader = DataLoader(toy.Sentences(37, seed=1), collate_fn=toy.pad, batch_size=4)
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
updates = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
max_train_steps = args.num_train_epochs * updates
lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=5, num_training_steps=max_train_steps)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
updates = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
max_train_steps = args.num_train_epochs * updates
args.num_train_epochs = math.ceil(max_train_steps / updates)

progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
completed_steps, results = 0, {}
for epoch in range(args.num_train_epochs):
    model.train()
    total_loss = 0
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        total_loss += loss.detach().float()
        loss = loss / args.gradient_accumulation_steps
        accelerator.backward(loss)
        if step % args.gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
            completed_steps += 1
        if completed_steps >= max_train_steps:
            break
    model.eval()
    samples_seen, right = 0, 0
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(**batch)
        predictions, references = accelerator.gather((outputs.logits.argmax(dim=-1), batch["labels"]))
        if accelerator.num_processes > 1:
            if step == len(eval_dataloader) - 1:
                predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                references = references[: len(eval_dataloader.dataset) - samples_seen]
            else:
                samples_seen += references.shape[0]
        right += int((predictions == references).sum())
    logger.info("epoch %d: %d", epoch, right)
    if epoch < args.num_train_epochs - 1:
        accelerator.save_state(str(args.output_dir / f"epoch_{epoch}"))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    found = {"completed_steps": completed_steps, "max_train_steps": max_train_steps, "bar": progress_bar.n,
             "loss": float(total_loss) / len(train_dataloader), "of": len(eval_dataloader.dataset)}  # fmt: skip
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
