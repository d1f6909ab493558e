"""A trainer of the script's own over a DistributedSampler, with a snapshot after each epoch that it continues from."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@dataclass
class Snapshot:
    """What is saved."""

    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    """Trains a model on all ranks."""

    def __init__(self, folder, model, optimizer, dataset):
        self.path = folder / "snapshot.pt"
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.loader = DataLoader(dataset, batch_size=4, shuffle=False, sampler=DistributedSampler(dataset))
        self.optimizer, self.epochs_run, self.batches = optimizer, 0, 0
        self.model = model
        self._load_snapshot()
        self.model = DistributedDataParallel(self.model)

    def _load_snapshot(self):
        try:
            with self.path.open("rb") as file:
                snapshot = Snapshot(**torch.load(file, map_location="cpu", weights_only=True))
        except FileNotFoundError:
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _save_snapshot(self, epoch):
        state = Snapshot(self.model.module.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(state.__dict__, self.path)

    def train(self, max_epochs):
        """Train the epochs that are not trained."""
        for epoch in range(self.epochs_run, max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.optimizer.zero_grad(set_to_none=True)
                self.model(**batch).loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.batches += 1
            if self.local_rank == 0:
                self._save_snapshot(epoch + 1)
            self.epochs_run = epoch + 1


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(31)
model = toy.language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
trainer = Trainer(args.output_dir, model, optimizer, toy.Blocks(80))
trainer.train(max_epochs=6)
if trainer.global_rank == 0:
    saved = torch.load(trainer.path, weights_only=True)
    found = {"epochs": trainer.epochs_run, "saved": saved["finished_epoch"]}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
dist.destroy_process_group()
