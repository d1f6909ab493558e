"""A module and a data module that LightningCLI makes of options, with a checkpoint by steps."""

import json
import sys
from pathlib import Path

import lightning
import toy
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

output_dir = Path(sys.argv[sys.argv.index("--output_dir") + 1])


class Regression(lightning.LightningModule):
    """Predicts sums."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.model(x), y), sync_dist=True)


class PointsData(lightning.LightningDataModule):
    """Points."""

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(toy.Points(), shuffle=True, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(toy.Points(16, seed=1), batch_size=self.batch_size)


cli = LightningCLI(
    Regression,
    PointsData,
    seed_everything_default=25,
    trainer_defaults={
        "max_steps": 45,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(output_dir),
        "strategy": "ddp",
        "callbacks": [lightning.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=10, save_top_k=-1)],
    },
    args=[
        *("fit", "--optimizer=torch.optim.AdamW", "--optimizer.lr=0.005"),
        *("--lr_scheduler=torch.optim.lr_scheduler.ExponentialLR", "--lr_scheduler.gamma=0.5"),
    ],
    save_config_kwargs={"overwrite": False},
)
if cli.trainer.is_global_zero:
    found = {"completed_steps": cli.trainer.global_step, "epoch": cli.trainer.current_epoch}
    (output_dir / "all_results.json").write_text(json.dumps(found))
