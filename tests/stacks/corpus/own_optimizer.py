"""Trains two models with one optimizer that has states of its own, made at its first step, and two modes."""

import argparse
import itertools
import json
from pathlib import Path

import torch
import toy
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--die_in_evaluation", type=int, help="epoch whose evaluation rank 0 does not survive, once")
args = parser.parse_args()


class Averaging(torch.optim.Optimizer):
    """Steps from one sequence of weights, and evaluates another that averages it."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": True, "weights": {"sum": 0.0, "last": None}})

    def train(self):
        self._swap(train=True)

    def eval(self):
        self._swap(train=False)

    @torch.no_grad()
    def _swap(self, *, train):
        for group in self.param_groups:
            if group["train_mode"] != train:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if "other" in state:
                        kept = parameter.clone()
                        parameter.copy_(state["other"])
                        state["other"].copy_(kept)
                group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weights"] = {"sum": group["weights"]["sum"] + 1.0 / group["k"], "last": group["lr"]}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["other"] = parameter.clone()
                    state["history"] = {"norms": [], "moments": (torch.zeros_like(parameter), torch.zeros(()))}
                    state["signs"], state["map"] = torch.zeros_like(parameter, dtype=torch.uint8), torch.ones(256)
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["other"].lerp_(parameter, 1 / group["k"])
                state["history"]["norms"] = [*state["history"]["norms"], float(parameter.grad.norm())][-5:]
                state["signs"].add_(parameter.grad > 0)
                state["history"]["moments"][0].lerp_(parameter.grad, 0.1)


accelerator = Accelerator()
torch.manual_seed(13)
encoder, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)
train_dataloader = DataLoader(toy.Points(), shuffle=True, batch_size=4)
eval_dataloader = DataLoader(toy.Points(16, seed=1), batch_size=4)
optimizer = Averaging(itertools.chain(encoder.parameters(), head.parameters()))
encoder, head, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
    encoder, head, optimizer, train_dataloader, eval_dataloader
)
steps, loss = 0, 0.0
for epoch in range(2):
    encoder.train()
    head.train()
    optimizer.train()
    for x, y in train_dataloader:
        accelerator.backward(nn.functional.mse_loss(head(encoder(x)), y))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    encoder.eval()
    head.eval()
    optimizer.eval()
    if epoch == args.die_in_evaluation:
        toy.die_once(accelerator, args.output_dir / "died")
    with torch.no_grad():
        parts = [accelerator.gather_for_metrics((head(encoder(x)) - y).square()) for x, y in eval_dataloader]
    loss = torch.cat(parts).mean().item()
state = next(iter(optimizer.state.values()))
if accelerator.is_main_process:
    found = {"completed_steps": steps, "loss": loss, "k": optimizer.param_groups[0]["k"],
             "norms": len(state["history"]["norms"]), "signs": str(state["signs"].dtype)}  # fmt: skip
    (args.output_dir / "all_results.json").write_text(json.dumps(found))
accelerator.end_training()
