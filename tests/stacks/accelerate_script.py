"""Trains a small classifier with a loop of its own, as the documentation of accelerate shows it.

It records the samples and learning rate of its steps, the accuracies, and the final weights in the folder that it is
given.
"""

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig, set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--pause", type=float, default=0.03)
parser.add_argument("--die-in-evaluation", action="store_true")
parser.add_argument("--by-hand", action="store_true")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--zero", type=int, help="stage of DeepSpeed's ZeRO")
parser.add_argument("--fsdp", type=int, help="version of FSDP")
parser.add_argument("--replicas", type=int, default=1, help="of a model that FSDP shards")
args = parser.parse_args()


class Points(Dataset):
    """Points whose class is whether the sum of their coordinates is positive."""

    def __init__(self, count):
        self.points = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        self.classes = (self.points.sum(1) > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"points": self.points[index], "labels": self.classes[index], "index": torch.tensor(index)}


def record(**line):
    """Append a line to the file of this process."""
    with (args.folder / f"steps.{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")


plugin = None if args.zero is None else DeepSpeedPlugin(zero_stage=args.zero)
sharding = {}
if args.fsdp is not None:
    import fsdp_on_cpus  # noqa: F401

    policy = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 50}
    sharding["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=args.fsdp, **policy)
    if args.replicas > 1:
        sharding["parallelism_config"] = ParallelismConfig(dp_replicate_size=args.replicas, dp_shard_size=2)
accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, deepspeed_plugin=plugin, **sharding)
set_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(args.dropout), nn.ReLU(), nn.Linear(32, 2))
train_dataloader = DataLoader(Points(args.samples), shuffle=True, batch_size=8)
eval_dataloader = DataLoader(Points(100), batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
total = len(train_dataloader) * args.epochs // args.accumulate
lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)

starting_epoch, resume_step = 0, None
folders = sorted(args.folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
if args.resume and folders:
    accelerator.print(f"Resumed from checkpoint: {folders[-1]}")
    accelerator.load_state(str(folders[-1]))
    resume_step = int(folders[-1].name.removeprefix("step_")) * args.accumulate
    starting_epoch = resume_step // len(train_dataloader)
    resume_step -= starting_epoch * len(train_dataloader)
completed_steps = (starting_epoch * len(train_dataloader) + (resume_step or 0)) // args.accumulate

accuracies = {}
for epoch in range(starting_epoch, args.epochs):
    model.train()
    active_dataloader = train_dataloader
    if args.resume and epoch == starting_epoch and resume_step is not None:
        active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
    for step, batch in enumerate(active_dataloader):
        with contextlib.nullcontext() if args.by_hand else accelerator.accumulate(model):
            record(epoch=epoch, samples=batch["index"].tolist())
            time.sleep(args.pause)
            loss = nn.functional.cross_entropy(model(batch["points"]), batch["labels"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if not args.by_hand or (step + 1) % args.accumulate == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            if accelerator.is_main_process:
                record(rate=lr_scheduler.get_last_lr()[0])
            if args.resume and completed_steps % 10 == 0:
                accelerator.save_state(str(args.folder / f"step_{completed_steps}"))
    model.eval()
    correct = count = 0
    for batch in eval_dataloader:
        if args.die_in_evaluation and accelerator.is_main_process and not (args.folder / "died").exists():
            (args.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            predictions = model(batch["points"]).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct, count = correct + int((predictions == labels).sum()), count + len(labels)
    accuracies[epoch] = correct / count
    accelerator.print(f"epoch {epoch}: accuracy {correct / count:.3f} of {count}")

accelerator.wait_for_everyone()
weights = accelerator.get_state_dict(accelerator.unwrap_model(model))
if accelerator.is_main_process:
    torch.save(weights, args.folder / "model.pt")
    text = json.dumps({"accuracies": accuracies, "completed_steps": completed_steps})
    (args.folder / "record.json").write_text(text)
