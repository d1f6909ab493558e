"""Trains in the shape of timm's train.py: an average of the weights, a schedule by updates, a saver with its folder."""

import copy
import math

import torch
import torch.distributed as dist
from offline import Points, arguments, record
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = arguments(epochs=6)


class ModelEma(nn.Module):
    """A moving average of a model, as timm's ModelEmaV3."""

    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.lerp_(value, 1 - self.decay)


class CosineSchedule:
    """A schedule of the updates."""

    def __init__(self, optimizer, updates):
        self.optimizer, self.updates = optimizer, updates

    def step_update(self, update):
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * min(1, update / self.updates)))


class Saver:
    """Keeps the last checkpoint, and the best one beside it."""

    def __init__(self, folder):
        self.folder, self.best = folder, None

    def save(self, epoch, metric):
        state = {
            "epoch": epoch,
            "state_dict": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state_dict_ema": ema.module.state_dict(),
            "metric": metric,
        }
        torch.save(state, self.folder / "tmp.pth.tar")
        (self.folder / "tmp.pth.tar").replace(self.folder / "last.pth.tar")
        if self.best is None or metric < self.best:
            self.best = metric
            torch.save(state, self.folder / "model_best.pth.tar")


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
ema = ModelEma(model, 0.9)
start_epoch, last = 0, args.output_dir / "last.pth.tar"
if last.exists():
    checkpoint = torch.load(last, weights_only=True)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    ema.module.load_state_dict(checkpoint["state_dict_ema"])
    start_epoch = checkpoint["epoch"] + 1
model = DistributedDataParallel(model)
data, held = Points(80), Points(40, seed=1)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), drop_last=True)
schedule = CosineSchedule(optimizer, len(loader) * args.epochs)
saver = Saver(args.output_dir) if dist.get_rank() == 0 else None
for epoch in range(start_epoch, args.epochs):
    loader.sampler.set_epoch(epoch)
    model.train()
    for index, (x, y) in enumerate(loader):
        nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model.module)
        schedule.step_update(epoch * len(loader) + index + 1)
    with torch.no_grad():
        metric = nn.functional.mse_loss(ema.module(held.points), held.targets)
    dist.all_reduce(metric)
    if saver:
        saver.save(epoch, float(metric) / dist.get_world_size())
if saver:
    record(args, epochs=torch.load(last, weights_only=True)["epoch"] + 1, rate=optimizer.param_groups[0]["lr"])
dist.destroy_process_group()
