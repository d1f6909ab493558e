"""Trains a language model to a limit of steps, with tracking and folders by steps, and continues from the newest."""

import argparse
import json
import math
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--max_train_steps", type=int, default=45)
parser.add_argument("--checkpointing_steps", type=int, default=10)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--die_in_save", action="store_true")
parser.add_argument("--save_on_main", action="store_true", help="as the scripts of diffusion models do")
args = parser.parse_args()


class Average:
    """A moving average in the shape of that of diffusers, with a number of updates that it depends on."""

    def __init__(self, parameters):
        self.values, self.updates = [each.detach().clone() for each in parameters], 0

    @torch.no_grad()
    def update(self, parameters):
        self.updates += 1
        decay = min(0.9, self.updates / (9 + self.updates))
        for value, each in zip(self.values, parameters, strict=True):
            value.sub_((1 - decay) * (value - each))


class Lines(GeneralTracker):
    """Writes what is logged to a file."""

    name = "lines"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()

    @property
    def tracker(self):
        return None

    @on_main_process
    def store_init_configuration(self, values):
        pass

    @on_main_process
    def log(self, values, step=None, **_):
        with (args.output_dir / "tracked.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


accelerator = Accelerator(log_with=[Lines()])
torch.manual_seed(1)
train_dataset, eval_dataset = toy.Blocks(), toy.Blocks(20, seed=1)
train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=4)
eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=4)
model = toy.language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
lr_scheduler = get_scheduler(
    name="cosine",
    optimizer=optimizer,
    num_warmup_steps=6 * accelerator.num_processes,
    num_training_steps=args.max_train_steps * accelerator.num_processes,
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
updates = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
num_train_epochs = math.ceil(args.max_train_steps / updates)


if args.save_on_main:
    average = Average(model.parameters())

    def save_average(models, weights, folder):
        torch.save([average.values, average.updates], Path(folder, "average.pt"))

    def load_average(models, folder):
        average.values, average.updates = torch.load(Path(folder, "average.pt"))

    accelerator.register_save_state_pre_hook(save_average)
    accelerator.register_load_state_pre_hook(load_average)
if args.die_in_save:
    accelerator.register_save_state_pre_hook(lambda *_: toy.die_once(accelerator, args.output_dir / "died"))
accelerator.init_trackers("clm", {"lr": 5e-4})

completed_steps, starting_epoch, resume_step = 0, 0, None
folders = sorted(args.output_dir.glob("step_*"), key=lambda path: path.stat().st_ctime)
if args.resume and folders:
    accelerator.load_state(str(folders[-1]))
    resume_step = int(folders[-1].stem.replace("step_", "")) * accelerator.gradient_accumulation_steps
    starting_epoch = resume_step // len(train_dataloader)
    completed_steps = resume_step // accelerator.gradient_accumulation_steps
    resume_step -= starting_epoch * len(train_dataloader)

for epoch in range(starting_epoch, num_train_epochs):
    model.train()
    total_loss = 0
    if args.resume and epoch == starting_epoch and resume_step is not None:
        active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
    else:
        active_dataloader = train_dataloader
    for batch in active_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            if args.save_on_main:
                average.update(model.parameters())
            if completed_steps % args.checkpointing_steps == 0 and (
                accelerator.is_main_process or not args.save_on_main
            ):
                accelerator.save_state(str(args.output_dir / f"step_{completed_steps}"))
        if completed_steps >= args.max_train_steps:
            break
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(4)))
    perplexity = math.exp(torch.cat(losses).mean())
    accelerator.log(
        {"perplexity": perplexity, "train_loss": total_loss.item() / len(train_dataloader), "epoch": epoch},
        step=completed_steps,
    )
accelerator.wait_for_everyone()
accelerator.unwrap_model(model)
if accelerator.is_main_process:
    tracked = [json.loads(line) for line in (args.output_dir / "tracked.jsonl").read_text().splitlines()]
    found = {"completed_steps": completed_steps, "tracked": [[each["step"], each["epoch"]] for each in tracked],
             "rate": lr_scheduler.get_last_lr()[0]}  # fmt: skip
    if args.save_on_main:
        found |= {"updates": average.updates, "average": float(torch.cat([v.flatten() for v in average.values]).norm())}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
accelerator.end_training()
