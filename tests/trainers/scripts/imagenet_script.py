"""Trains in the shape of torch's ImageNet example: a sampler, and a checkpoint of each epoch to resume from."""

import shutil

import torch
import torch.distributed as dist
from offline import Points, arguments, record
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

args = arguments(epochs=6)


class AverageMeter:
    """Computes and stores the average."""

    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, count):
        self.sum, self.count = self.sum + value * count, self.count + count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()


def validate():
    model.eval()
    top1 = AverageMeter()
    with torch.no_grad():
        for images, target in val_loader:
            top1.update(float((model(images).argmax(1) == target).float().mean()), len(target))
    top1.all_reduce()
    return top1.sum / top1.count


def save_checkpoint(state, is_best):
    path = args.output_dir / "checkpoint.pth.tar"
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)
    if is_best:
        shutil.copyfile(path, args.output_dir / "model_best.pth.tar")


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
start_epoch, best = 0, 0.0
resume = args.output_dir / "checkpoint.pth.tar"
if resume.is_file():
    checkpoint = torch.load(resume, weights_only=True)
    start_epoch, best = checkpoint["epoch"], checkpoint["best_acc1"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
train_data, val_data = Points(80, classes=3), Points(40, classes=3, seed=1)
sampler = DistributedSampler(train_data)
train_loader = DataLoader(train_data, batch_size=4, shuffle=False, sampler=sampler)
val_loader = DataLoader(val_data, batch_size=4, sampler=DistributedSampler(val_data, shuffle=False))
for epoch in range(start_epoch, args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for images, target in train_loader:
        loss = nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = validate()
    scheduler.step()
    is_best, best = accuracy > best, max(accuracy, best)
    if dist.get_rank() == 0:
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc1": best,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        save_checkpoint(state, is_best)
if dist.get_rank() == 0:
    record(args, epochs=torch.load(resume, weights_only=True)["epoch"], rate=optimizer.param_groups[0]["lr"])
dist.destroy_process_group()
