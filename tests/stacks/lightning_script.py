"""Trains a small classifier with Lightning's ``Trainer``, as its documentation shows it.

It records the samples that it trains, the learning rate of each step, and the final weights in the folder that it is
given.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.03)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--sharded", action="store_true", help="by FSDP2")
options = parser.parse_args()


class Points(Dataset):
    """Points whose class is whether the sum of their coordinates is positive."""

    def __init__(self, count):
        self.points = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        self.classes = (self.points.sum(1) > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.classes[index], index


def record(**line):
    """Append a line to the file of this process."""
    with (options.folder / f"steps.{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(options.dropout), nn.ReLU(), nn.Linear(32, 2))

    def configure_model(self):
        if options.sharded:
            for part in (self.net[0], self.net[3], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        points, classes, index = batch
        record(seen=index.tolist(), epoch=self.current_epoch)
        time.sleep(options.pause)
        loss = nn.functional.cross_entropy(self.net(points), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        points, classes, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(points), classes), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            record(validated=self.current_epoch, step=self.global_step)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.is_global_zero:
            record(step=self.global_step, rate=optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


pl.seed_everything(0, verbose=False)
strategy = pl.strategies.DDPStrategy(timeout=timedelta(hours=2))
if options.sharded:
    strategy = pl.strategies.ModelParallelStrategy(3, tensor_parallel_size=1)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=3,
    strategy=strategy,
    max_epochs=options.epochs,
    accumulate_grad_batches=options.accumulate,
    default_root_dir=options.folder,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(
    model, DataLoader(Points(options.samples), batch_size=8, shuffle=True), DataLoader(Points(100), batch_size=16)
)
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if trainer.is_global_zero:
    torch.save(weights, options.folder / "model.pt")
    lines = [json.loads(line) for file in options.folder.glob("steps.*") for line in file.read_text().splitlines()]
    group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    document = {
        "timeout": group.options._timeout.total_seconds(),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "loss": float(trainer.callback_metrics["val_loss"]),
        "rates": sorted([each["step"], each["rate"]] for each in lines if "rate" in each),
        "validated": sorted([each["validated"], each["step"]] for each in lines if "validated" in each),
    }
    (options.folder / "record.json").write_text(json.dumps(document))
