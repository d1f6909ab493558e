"""A Lightning module and callbacks that keep a part of the training beside the weights: averages, lists, counters.

``--callback`` adds one of Lightning's that changes the training by the epoch.
"""

import argparse
import json
from pathlib import Path

import lightning
import torch
import torchmetrics
import toy
from lightning.pytorch import callbacks
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--callback", default="average")
args = parser.parse_args()


class Counted(nn.Tanh):
    """A layer that keeps numbers of its own."""

    def __init__(self):
        super().__init__()
        self.epochs, self.steps = 0, []


class Classifier(lightning.LightningModule):
    """Classifies points."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), Counted())
        self.head = nn.Linear(16, 2)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.losses, self.means, self.seen = [], [], 0

    def on_train_epoch_start(self):
        self.losses.clear()
        self.epoch = {"number": self.current_epoch}
        self.backbone[1].epochs += 1
        self.backbone[1].steps.append(self.global_step)

    def training_step(self, batch, _):
        x, y = batch
        scores = self.head(self.backbone(x))
        loss = nn.functional.cross_entropy(scores, y)
        self.losses.append(loss.detach())
        self.seen += len(y) * self.trainer.world_size
        self.labels = y  # for the hook
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, _):
        assert self.epoch["number"] == self.current_epoch
        assert torch.equal(self.labels, batch[1])

    def on_train_epoch_end(self):
        self.means.append(float(self.all_gather(torch.stack(self.losses).mean()).mean()))

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.backbone(x)), y), sync_dist=True)

    def configure_optimizers(self):
        weights = self.head.parameters() if args.callback == "finetuning" else self.parameters()
        return torch.optim.Adam(weights, lr=0.01)


class Own(lightning.Callback):
    """Keeps an average of the weights of its own, by the hooks for checkpoints."""

    def setup(self, trainer, module, stage):
        self.average = [each.detach().clone() for each in module.parameters()]
        self.updates = 0

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step > self.updates:
            self.updates = trainer.global_step
            for average, weight in zip(self.average, module.parameters(), strict=True):
                average.lerp_(weight.detach(), 0.1)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["own_average"] = self.average

    def on_load_checkpoint(self, trainer, module, checkpoint):
        for average, saved in zip(self.average, checkpoint["own_average"], strict=True):
            average.copy_(saved)


own = Own()
chosen = {
    "average": lambda: callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "finetuning": lambda: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
    "swa": lambda: callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
}[args.callback]()
lightning.seed_everything(23)
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    callbacks=[own, chosen],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    strategy="ddp",
)
model = Classifier()
kind = StatefulDataLoader if args.callback == "average" else DataLoader
data = kind(toy.Points(classes=True), shuffle=True, batch_size=4)
trainer.fit(model, data, DataLoader(toy.Points(32, seed=1, classes=True), batch_size=4))
if trainer.is_global_zero:
    found = {
        "completed_steps": trainer.global_step,
        "updates": own.updates,
        "own": float(torch.stack([each.norm() for each in own.average]).sum()),
        "weights": float(torch.stack([each.detach().norm() for each in model.parameters()]).sum()),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "accuracy": float(trainer.callback_metrics["accuracy"]),
        "means": model.means,
        "seen": model.seen,
        "layer": [model.backbone[1].epochs, model.backbone[1].steps],
    }
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
