"""Trains with accelerate in the order of a sampler, or the batches of a batch sampler, that the script brings.

Samples are sequences of different lengths, which are padded. It records the samples that the model computes with
gradients, and the final weights.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

SAMPLES, BATCH, EPOCHS = 90, 4, 3
KINDS = ("weighted", "seeded", "buckets", "subset", "replacement")


class Seeded(Sampler):
    """All samples in an order of the sampler's own generator, which goes on from epoch to epoch."""

    def __init__(self, length):
        self.length, self.generator = length, torch.Generator().manual_seed(7)

    def __len__(self):
        return self.length

    def __iter__(self):
        yield from torch.randperm(self.length, generator=self.generator).tolist()


class Buckets:
    """Batches of sequences of nearly one length, in which they differ in number, in another order in each epoch."""

    batch_size, drop_last = None, False

    def __init__(self, lengths):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches, self.epoch = [], 0
        while order:
            size = max(1, 24 // lengths[order[0]])
            self.batches.append(order[:size])
            order = order[size:]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(self.epoch))
        yield from (self.batches[index] for index in order.tolist())


class Model(nn.Module):
    """A linear model of the mean over a sequence; it computes nothing of the padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1)
        self.seen = []

    def forward(self, x, mask, index):
        self.seen += index.tolist()
        return self.layer(x).squeeze(-1).mul(mask).sum(1) / mask.sum(1)


def sequences():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 9, (SAMPLES,), generator=generator).tolist()
    return [(index, torch.randn(length, 3, generator=generator)) for index, length in enumerate(lengths)]


def collate(samples):
    x = pad_sequence([each for _, each in samples], batch_first=True)
    mask = pad_sequence([torch.ones(len(each)) for _, each in samples], batch_first=True)
    return {"x": x, "mask": mask, "index": torch.tensor([index for index, _ in samples])}


def make_loader(kind, data):
    """Return the training loader of a kind."""
    generator, weights = torch.Generator().manual_seed(5), [1.0 + index % 3 for index in range(SAMPLES)]
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets([len(x) for _, x in data]), collate_fn=collate)
    sampler = {
        "weighted": lambda: WeightedRandomSampler(weights, 60, generator=generator),
        "seeded": lambda: Seeded(SAMPLES),
        "subset": lambda: SubsetRandomSampler(range(0, SAMPLES, 2), generator=generator),
        "replacement": lambda: RandomSampler(data, replacement=True, num_samples=50, generator=generator),
    }[kind]()
    return DataLoader(data, BATCH, sampler=sampler, collate_fn=collate)


def loss_of(model, batch):
    target = batch["x"].sum((1, 2))
    return nn.functional.mse_loss(model(batch["x"], batch["mask"], batch["index"]), target)


def evaluated(model, data):
    with torch.no_grad():
        return float(loss_of(model, collate(data)))


def main():
    """Train."""
    from accelerate import Accelerator  # a test imports the rest

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    data = sequences()
    plain = Model()
    accelerator = Accelerator()
    # The other half, as a loader of the same kind and class: no data of the training.
    held_out = DataLoader(data, BATCH, sampler=SubsetRandomSampler(range(1, SAMPLES, 2)), collate_fn=collate)
    model, optimizer, loader, held_out = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.02), make_loader(options.kind, data), held_out
    )
    # Not prepared: accelerate knows nothing of it.
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    if accelerator.is_main_process:
        next(iter(loader))  # to look at
    steps = samples = 0
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            plain.seen.clear()
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            steps += 1
            samples += len(batch["index"])
            time.sleep(options.pause)
            with (options.folder / f"seen.{os.getpid()}").open("a") as file:
                file.write(json.dumps([steps, plain.seen]) + "\n")
        model.eval()
        scheduler.step(evaluated(plain, data))
        with torch.no_grad():
            assert not any(index % 2 == 0 for batch in held_out for index in batch["index"].tolist())
    total = int(accelerator.reduce(torch.tensor(samples)))
    if accelerator.is_main_process:
        weights = plain.layer.weight.flatten().tolist()
        record = {"steps": steps, "samples": total, "weights": weights, "length": len(loader)}
        (options.folder / "record.json").write_text(json.dumps(record))
    accelerator.end_training()


if __name__ == "__main__":
    main()
