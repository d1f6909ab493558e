"""A Lightning module with callbacks: checkpoints of the best, an early stop, a logger, counters of its own."""

import argparse
import json
from pathlib import Path

import lightning
import torch
import toy
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    """Classifies points."""

    def __init__(self):
        super().__init__()
        self.model = toy.perceptron(2)
        self.validated = 0

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            with (args.output_dir / "steps.txt").open("a") as file:
                file.write(f"{self.trainer.global_step}\n")

    def validation_step(self, batch, _):
        x, y = batch
        scores = self.model(x)
        self.log("val_loss", nn.functional.cross_entropy(scores, y), sync_dist=True)

    def on_validation_end(self):
        self.validated += not self.trainer.sanity_checking

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Average(lightning.Callback):
    """Keeps an average of the weights, and a number as a tensor, outside of what Lightning saves."""

    def on_train_start(self, trainer, module):
        self.kept = [each.detach().clone() for each in module.parameters()]
        self.count = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step > self.count:  # a step may have several batches
            self.count += 1
            for average, each in zip(self.kept, module.parameters(), strict=True):
                average.lerp_(each, 0.1)


lightning.seed_everything(23)
average = Average()
best = ModelCheckpoint(monitor="val_loss", save_top_k=2, dirpath=args.output_dir / "best")
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="auto",
    logger=CSVLogger(args.output_dir, name="csv"),
    callbacks=[best, EarlyStopping("val_loss", patience=5), LearningRateMonitor(), average],
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=args.output_dir,
    num_nodes=1,
    strategy="ddp",
)
model = Classifier()
data = DataLoader(toy.Points(classes=True), shuffle=True, batch_size=4)
trainer.fit(model, data, DataLoader(toy.Points(30, seed=1, classes=True), batch_size=4))
if trainer.is_global_zero:
    steps = sorted(set(map(int, (args.output_dir / "steps.txt").read_text().split())))
    found = {"completed_steps": trainer.global_step, "epoch": trainer.current_epoch, "steps": steps,
             "kept": len(best.best_k_models), "loss": float(best.best_model_score)}  # fmt: skip
    norm = float(torch.cat([each.flatten() for each in average.kept]).norm())
    found |= {"average": norm, "updates": int(average.count)}
    (args.output_dir / "steps.txt").unlink()
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
