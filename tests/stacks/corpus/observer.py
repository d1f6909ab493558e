"""Runs a script and writes down what it trains, by the hooks of torch alone.

Each optimizer step of a process is a line: the optimizer, its learning rate and the samples whose forward passes were
computed with gradients since the last step. The script knows nothing of it, and neither does what recovers it.
"""

import argparse
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data._utils.fetch import _MapDatasetFetcher

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--script", required=True)
parser.add_argument("--full", type=int, default=0, help="go slowly while there are fewer ranks")
parser.add_argument("--pause", type=float, default=0.03, help="seconds after each step")
observed, rest = parser.parse_known_args()

fetched, trained = [], []
names = {}
pause = [observed.pause]


def fetch(self, ids, _fetch=_MapDatasetFetcher.fetch):
    """Note which samples a loader takes from its dataset."""
    fetched.extend(ids if isinstance(ids, list) else [ids])
    return _fetch(self, ids)


def forward(module, inputs):
    """Take the samples for trained if a model computes them with gradients."""
    if fetched and torch.is_grad_enabled() and not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        trained.extend(fetched)
    fetched.clear()


def stepped(optimizer, args, kwargs):
    """Write down a step, which others may follow slowly."""
    size = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    line = {"optimizer": size, "rate": optimizer.param_groups[0]["lr"], "samples": list(map(int, trained))}
    trained.clear()
    with (observed.folder / f"observed.{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")
    if observed.full and dist.is_initialized():
        pause[0] = observed.pause if dist.get_world_size() == observed.full else min(1.0, pause[0] * 1.12)
        time.sleep(pause[0])


_MapDatasetFetcher.fetch = fetch
torch.nn.modules.module.register_module_forward_pre_hook(forward)
register_optimizer_step_post_hook(stepped)
script = Path(__file__).with_name(observed.script)
sys.argv = [str(script), "--output_dir", str(observed.folder), *rest]
runpy.run_path(str(script), run_name="__main__")
