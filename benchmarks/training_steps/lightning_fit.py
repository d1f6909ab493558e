"""Trains a small classifier with Lightning's ``Trainer``, the same script under torchrun and under this library."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from turns import TOTAL_STEPS, Turns


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), *[nn.Linear(1024, 1024), nn.ReLU()] * 3, nn.Linear(1024, 2))
        self._turns = Turns()

    def on_train_batch_start(self, *_):
        self._turns.step()

    def training_step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0, verbose=False)
points = torch.randn(64 * TOTAL_STEPS, 64)
one_node = os.environ["BENCH_SIDE"] == "0"  # torchrun's; under this library each node has one process
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2 if one_node else 1,
    num_nodes=1 if one_node else 2,
    strategy="ddp",
    max_epochs=2,
    max_steps=TOTAL_STEPS,
    default_root_dir=os.environ["BENCH_FOLDER"],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = TensorDataset(points, (points.sum(1) > 0).long())
trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
