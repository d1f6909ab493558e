"""Trains in the shape of torch's FSDP2 example: sharded by hand, with a checkpoint that each rank writes a part of."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from offline import Points, arguments, record
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

args = arguments(epochs=6)
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


class Training:
    """What is saved: the model, the optimizer and the number of trained epochs."""

    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.epoch = state["epoch"]


training = Training()
saved = sorted(folder for folder in args.output_dir.glob("epoch-*") if (folder / ".metadata").exists())
if saved:
    dcp.load({"training": training}, checkpoint_id=saved[-1])
data = Points(80)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
for epoch in range(training.epoch, args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.epoch = epoch + 1
    dcp.save({"training": training}, checkpoint_id=args.output_dir / f"epoch-{epoch + 1}")
if dist.get_rank() == 0:
    record(args, epochs=training.epoch)
dist.destroy_process_group()
