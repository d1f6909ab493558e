"""Trains two models in turn, each with its optimizer."""

import argparse
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--die_between_updates", action="store_true", help="rank 0 is killed once, in step 10")
args = parser.parse_args()


accelerator = Accelerator()
torch.manual_seed(10)
generator, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), toy.perceptron()
loader = DataLoader(toy.Points(), shuffle=True, batch_size=4)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
generator, critic, g_optimizer, d_optimizer, loader = accelerator.prepare(
    generator, critic, g_optimizer, d_optimizer, loader
)
criterion = nn.BCEWithLogitsLoss()
steps, g_total, d_total = 0, 0.0, 0.0
for _ in range(2):
    for real, _ in loader:
        d_optimizer.zero_grad()
        fake = generator(torch.randn(len(real), 4, device=accelerator.device))
        scores = critic(torch.cat([real, fake.detach()]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(scores.device)
        d_loss = criterion(scores, wanted)
        accelerator.backward(d_loss)
        d_optimizer.step()
        if args.die_between_updates and steps == 9:
            toy.die_once(accelerator, args.output_dir / "died")
        g_optimizer.zero_grad()
        g_loss = criterion(critic(fake), torch.ones(len(real), 1, device=scores.device))
        accelerator.backward(g_loss)
        g_optimizer.step()
        d_total, g_total, steps = d_total + d_loss.item(), g_total + g_loss.item(), steps + 1
if accelerator.is_main_process:
    found = {"completed_steps": steps, "loss": (d_total + g_total) / steps}
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
