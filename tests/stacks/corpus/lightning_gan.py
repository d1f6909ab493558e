"""A Lightning module that steps two optimizers by hand."""

import argparse
import json
from pathlib import Path

import lightning
import torch
import toy
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()


class Adversaries(lightning.LightningModule):
    """A generator of points and a critic."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = toy.perceptron()
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, _):
        real, _ = batch
        g_optimizer, d_optimizer = self.optimizers()
        ones = torch.ones(len(real), 1, device=self.device)
        noise = torch.randn(len(real), 4, device=self.device)
        self.toggle_optimizer(g_optimizer)
        g_loss = self.criterion(self.critic(self(noise)), ones)
        self.manual_backward(g_loss)
        g_optimizer.step()
        g_optimizer.zero_grad()
        self.untoggle_optimizer(g_optimizer)
        self.toggle_optimizer(d_optimizer)
        d_loss = self.criterion(self.critic(real), ones) + self.criterion(
            self.critic(self(noise).detach()), torch.zeros_like(ones)
        )
        self.manual_backward(d_loss)
        d_optimizer.step()
        d_optimizer.zero_grad()
        self.untoggle_optimizer(d_optimizer)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
            torch.optim.Adam(self.critic.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        ], []


lightning.seed_everything(24)
trainer = lightning.Trainer(
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    strategy="ddp_find_unused_parameters_true",
    default_root_dir=args.output_dir,
)
trainer.fit(Adversaries(), DataLoader(toy.Points(), shuffle=True, batch_size=4))
if trainer.is_global_zero:
    found = {"completed_steps": trainer.global_step, "epoch": trainer.current_epoch}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
