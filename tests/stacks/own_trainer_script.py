"""Trains with a subclass of ``Trainer`` that brings its own loader, and reads and writes its checkpoints by itself.

It records the samples of each batch that it trains, what it logs, and the final weights.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--loader", choices=["weighted", "batches", "counted", "plain", "iterable", "foreign", "loop"])
parser.add_argument("--pause", type=float, default=0.03)
options = parser.parse_args()

SAMPLES, BATCH, EPOCHS = 160, 4, 2


class Alternating(BatchSampler):
    """Batches of samples of one kind each, even or odd, in another order in each epoch."""

    def __init__(self):
        super().__init__(range(SAMPLES), BATCH, drop_last=False)

    def __iter__(self):
        kinds = [list(range(first, SAMPLES, 2)) for first in (0, 1)]
        batches = [kind[begin : begin + BATCH] for kind in kinds for begin in range(0, SAMPLES // 2, BATCH)]
        yield from (batches[index] for index in torch.randperm(len(batches)).tolist())

    def __len__(self):
        return SAMPLES // BATCH


class Stream(IterableDataset):
    """The samples one after the other."""

    def __iter__(self):
        yield from data


class Foreign:
    """An iterable over batches that is no ``DataLoader``, and gives each rank its part."""

    def __init__(self, dataset, ranks, rank):
        self.dataset, self.ranks, self.rank = dataset, ranks, rank

    def __len__(self):
        return SAMPLES // BATCH // self.ranks

    def __iter__(self):
        for batch in range(self.rank, SAMPLES // BATCH, self.ranks):
            yield torch.utils.data.default_collate(self.dataset[batch * BATCH : (batch + 1) * BATCH])


@dataclass
class Blocks(TrainingArguments):
    """Arguments with a size of blocks of samples, as those of trl's trainers that generate ahead of several steps."""

    def __post_init__(self):
        super().__post_init__()
        self.block = self.per_device_train_batch_size * self.world_size * 2


class Repeated(Sampler):
    """Each block of samples twice, as it is trained in two batches."""

    def __init__(self, block):
        self.block = block

    def __iter__(self):
        for begin in range(0, SAMPLES, self.block):
            yield from [*range(begin, begin + self.block)] * 2

    def __len__(self):
        return 2 * SAMPLES


class Own(Trainer):
    """A trainer as libraries have them."""

    def get_train_dataloader(self):
        if options.loader == "foreign":
            return Foreign(data, self.args.world_size, self.args.process_index)
        if options.loader == "plain":
            return DataLoader(data, BATCH, shuffle=True)
        if options.loader == "iterable":
            return self.accelerator.prepare(DataLoader(Stream(), BATCH))
        if options.loader == "counted":
            loader = DataLoader(data, 2 * BATCH, sampler=Repeated(self.args.block))
            return self.accelerator.prepare(loader)
        if options.loader == "batches":
            return self.accelerator.prepare(DataLoader(data, batch_sampler=Alternating()))
        sampler = WeightedRandomSampler(
            [1.0 + i % 3 for i in range(SAMPLES)], SAMPLES, generator=torch.Generator().manual_seed(0)
        )
        return self.accelerator.prepare(DataLoader(data, BATCH, sampler=sampler))

    def training_step(self, model, inputs, *args, **kwargs):
        time.sleep(options.pause)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        with (options.folder / f"seen.{os.getpid()}").open("a") as file:
            file.write(json.dumps([self.state.global_step, inputs["index"].tolist()]) + "\n")
        return (model(inputs["x"]).squeeze(1) - inputs["x"].sum(1)).pow(2).mean()

    def _load_from_checkpoint(self, folder, model=None):
        self.model.load_state_dict(torch.load(Path(folder) / "weights.pt"))

    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(self.accelerator.unwrap_model(self.model).state_dict(), Path(output_dir) / "weights.pt")


class Counting(Own):
    """A trainer that takes a block of samples for several batches, and counts them."""

    batches = 0

    def training_step(self, model, inputs, *args, **kwargs):
        time.sleep(options.pause)
        if self.batches % 2 == 0:
            self.block = {name: value.chunk(2) for name, value in inputs.items()}
        loss = self.compute_loss(model, {name: value[self.batches % 2] for name, value in self.block.items()})
        self.batches += 1
        self.accelerator.backward(loss / 2)
        return loss.detach() / 2


class Looping(Own):
    """A trainer with a loop of its own around nothing of ``Trainer``'s."""

    def train(self):
        self.create_optimizer()
        for batch in self.get_train_dataloader():
            self.accelerator.backward(self.compute_loss(self.model, batch))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1


torch.manual_seed(0)
data = [{"x": torch.randn(4), "index": index} for index in range(SAMPLES)]
length = {"max_steps": 40} if options.loader == "iterable" else {"num_train_epochs": EPOCHS}
kind, own, more = TrainingArguments, Own, {}
if options.loader == "counted":
    kind, own, more = Blocks, Counting, {"gradient_accumulation_steps": 2}
arguments = kind(
    str(options.folder / "output"),
    per_device_train_batch_size=BATCH,
    learning_rate=0.01,
    logging_steps=1,
    save_steps=10,
    report_to="none",
    remove_unused_columns=False,
    disable_tqdm=True,
    **length,
    **more,
)
if options.loader == "loop":
    own = Looping
trainer = own(model=nn.Linear(4, 1), args=arguments, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    weights = trainer.accelerator.unwrap_model(trainer.model).weight.tolist()
    record = {"log": trainer.state.log_history, "steps": trainer.state.global_step, "weights": weights}
    (options.folder / "record.json").write_text(json.dumps(record))
    trainer.model.weight = nn.Parameter(torch.zeros(1))  # as one that exports a part of its model, or merges it
