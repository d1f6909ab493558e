"""A loop over random batches that saves when it evaluates, and continues from its own file, with DDP by hand."""

import argparse
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

max_iters, eval_interval, warmup_iters, learning_rate, min_lr = 60, 5, 5, 1e-3, 1e-4
ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    master_process = dist.get_rank() == 0
    gradient_accumulation_steps = 4 // dist.get_world_size()
else:
    master_process, gradient_accumulation_steps = True, 4
torch.manual_seed(1337 + (dist.get_rank() if ddp else 0))
data = toy.Blocks().tokens


def get_batch():
    index = torch.randint(len(data), (4,))
    return data[index]


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


iter_num, best_val_loss = 0, 1e9
model = toy.language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
path = args.output_dir / "ckpt.pt"
if path.exists():
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = model
if ddp:
    model = DistributedDataParallel(model)
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        with torch.no_grad():
            loss = raw_model(data[:16], labels=data[:16]).loss.item()
        best_val_loss = min(best_val_loss, loss)
        if iter_num > 0:
            saved = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save({**saved, "best_val_loss": best_val_loss}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
    if iter_num >= max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        x = get_batch()
        (model(x, labels=x).loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
if master_process:
    (args.output_dir / "all_results.json").write_text(json.dumps({"iter_num": iter_num, "rate": lr}))
if ddp:
    dist.destroy_process_group()
