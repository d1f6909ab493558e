"""Trains with Lightning in a process group of its own, with a logger, callbacks that follow a metric, and hooks.

What its hooks do on rank 0 is in the record, besides what logger and callbacks have left. With ``--die`` rank 0 is
killed there, once.
"""

import argparse
import csv
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--die", nargs=2, action="append", default=[], help="place and number of the step or epoch")
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()


def reach(place, number):
    """Note that rank 0 is at a place, or die there."""
    if torch.distributed.get_rank():
        return
    killed = options.folder / f"killed.{place}.{number}"
    if [place, str(number)] in options.die and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with (options.folder / f"places.{os.getpid()}").open("a") as file:
        file.write(f"{place} {number}\n")


class Counting(pl.Callback):
    """Counts the steps that it has seen, and keeps the number with the training's state."""

    def __init__(self):
        self.steps = set()

    def on_train_batch_end(self, trainer, *_):
        self.steps.add(trainer.global_step)

    def state_dict(self):
        return {"steps": sorted(self.steps)}

    def load_state_dict(self, state):
        self.steps = set(state["steps"])


class Watch(pl.Callback):
    """Needs an object in its second hook that its first one makes."""

    def on_train_batch_start(self, *_):
        self.watch = SimpleNamespace(begun=time.time())

    def on_train_batch_end(self, *_):
        self.took = time.time() - self.watch.begun


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.mean_loss = MeanMetric()

    def on_train_epoch_start(self):
        self.began = SimpleNamespace(epoch=self.current_epoch)

    def training_step(self, batch, _):
        time.sleep(options.pause)
        self.points = batch[0]
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        self.log("loss", loss)
        self.log("seen", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, _):
        assert outputs["loss"].ndim == 0
        assert torch.equal(self.points, batch[0])
        assert self.began.epoch == self.current_epoch
        reach("hook", self.global_step)

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            reach("validation", self.current_epoch)

    def on_train_epoch_end(self):
        reach("epoch", self.current_epoch)

    def on_train_end(self):
        reach("end", self.current_epoch)

    def on_before_optimizer_step(self, optimizer):
        if not torch.distributed.get_rank():
            with (options.folder / f"rates.{os.getpid()}").open("a") as file:
                file.write(f"{self.global_step} {optimizer.param_groups[0]['lr']}\n")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


torch.distributed.init_process_group("gloo")
pl.seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
counting = Counting()
checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{step}")
stopping = EarlyStopping("val_loss", 0.001, 2)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=12,
    max_steps=options.max_steps,
    logger=CSVLogger(options.folder, "csv"),
    log_every_n_steps=1,
    callbacks=[counting, Watch(), checkpoint, stopping],
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Line(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
if trainer.is_global_zero:
    places = [line for file in options.folder.glob("places.*") for line in file.read_text().splitlines()]
    rates = [line.split() for file in options.folder.glob("rates.*") for line in file.read_text().splitlines()]
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    document = {
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "counted": len(counting.steps),
        "places": Counter(places),
        "rates": {int(step): float(rate) for step, rate in rates},
        "logged": {
            name: [line["step"] for line in lines if line[name]] for name in ("loss", "val_loss", "seen", "mean_loss")
        },
        "val_loss": [float(line["val_loss"]) for line in lines if line["val_loss"]],
        "seen": [float(line["seen"]) for line in lines if line["seen"]],
        "folders": [path.name for path in (options.folder / "csv").iterdir()],
        "best": str(Path(checkpoint.best_model_path).relative_to(options.folder)),
        "best_score": float(checkpoint.best_model_score),
        "kept": sorted(path.name for path in Path(checkpoint.dirpath).iterdir()),
        "waited": stopping.wait_count,
        "stopped": stopping.stopped_epoch,
    }
    (options.folder / "record.json").write_text(json.dumps(document))
