"""Trains by Lightning with one of its callbacks that change the training or keep a state."""

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import measure_flops
from offline import Points, arguments, record
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric

CALLBACKS = {
    "finetuning": lambda args: callbacks.BackboneFinetuning(
        unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, verbose=False
    ),
    "batch_size_finder": lambda args: callbacks.BatchSizeFinder(max_trials=2, init_val=2, steps_per_trial=1),
    "early_stopping": lambda args: callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.02),
    "accumulation": lambda args: callbacks.GradientAccumulationScheduler({1: 2}),
    "lambda": lambda args: callbacks.LambdaCallback(on_train_epoch_end=lambda *_: None),
    "lr_finder": lambda args: callbacks.LearningRateFinder(num_training_steps=10, attr_name="lr"),
    "lr_monitor": lambda args: callbacks.LearningRateMonitor(),
    "checkpoint": lambda args: callbacks.ModelCheckpoint(args.output_dir / "best", monitor="val_loss", save_last=True),
    "on_exception": lambda args: callbacks.OnExceptionCheckpoint(args.output_dir / "failed"),
    "pruning": lambda args: callbacks.ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.1),
    "swa": lambda args: callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=2),
    "throughput": lambda args: callbacks.ThroughputMonitor(lambda batch: len(batch[0])),
    "timer": lambda args: callbacks.Timer("00:01:00:00"),
    "averaging": lambda args: callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),
    "ema": lambda args: callbacks.EMAWeightAveraging(decay=0.9, update_every_n_steps=2),
    "torchmetrics": lambda args: callbacks.Callback(),
}
args = arguments(callback="averaging")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.lr, self.batch_size = 1e-2, 4
        self.accuracy, self.mean = Accuracy(task="multiclass", num_classes=3), MeanMetric()

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, _):
        x, y = batch
        scores = self(x)
        loss = nn.functional.cross_entropy(scores, y)
        if args.callback == "torchmetrics":
            self.accuracy(scores, y)
            self.mean.update(loss.detach(), len(y))
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    def train_dataloader(self):
        return DataLoader(Points(80, classes=3), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points(40, classes=3, seed=1), batch_size=4)


class Validated(callbacks.Callback):
    """Keeps what each epoch has logged."""

    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, module):
        names = ("accuracy", "mean", "val_loss")
        self.found.append([float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics])

    def state_dict(self):
        return {"found": self.found}

    def load_state_dict(self, state):
        self.found = state["found"]


torch.manual_seed(0)
model = Model()
validated, callback = Validated(), CALLBACKS[args.callback](args)
if args.callback == "throughput":
    with torch.device("meta"):
        meta = Model()
        model.flops_per_batch = measure_flops(meta, lambda: meta(torch.randn(4, 8)))
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    strategy="ddp",
    logger=CSVLogger(args.output_dir, name="csv"),
    log_every_n_steps=1,
    callbacks=[callback, validated],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=args.output_dir,
)
trainer.fit(model)
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
if trainer.is_global_zero:
    record(
        args,
        completed_steps=trainer.global_step,
        epochs=trainer.current_epoch,
        validated=[value for each in validated.found for value in each],
        final=float(weights.norm()),
        rate=trainer.optimizers[0].param_groups[0]["lr"],
        groups=len(trainer.optimizers[0].param_groups),
        zeros=int((weights == 0).sum()),
    )
