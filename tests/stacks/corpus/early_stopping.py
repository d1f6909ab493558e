"""Stops early, on the sign of one process."""

import argparse
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(5)
model = toy.perceptron()
train_dataloader = DataLoader(toy.Points(), shuffle=True, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
steps, stopped, samples = 0, False, []
for _ in range(5):
    model.train()
    samples.append(0)
    for x, y in train_dataloader:
        samples[-1] += len(x)
        loss = nn.functional.mse_loss(model(x), y)
        steps += 1
        if accelerator.is_main_process and steps >= 47:
            accelerator.set_trigger()
        accelerator.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if steps % 4 == 0 and accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), args.output_dir / f"model_{steps:02}.pt")
            accelerator.save_model(model, args.output_dir / f"model_{steps:02}")
        if accelerator.check_trigger():
            stopped = True
            break
    if stopped:
        break
samples = accelerator.reduce(torch.tensor(samples)).tolist()  # of as many processes as there are now
if accelerator.is_main_process:
    files = [torch.load(path) for path in sorted(args.output_dir.glob("model_*.pt"))]
    files += [load_file(path) for path in sorted(args.output_dir.glob("model_*/model.safetensors"))]
    norms = [float(torch.cat([each.flatten() for each in weights.values()]).norm()) for weights in files]
    found = {"completed_steps": steps, "stopped": stopped, "samples": samples, "weights": norms}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
accelerator.end_training()
