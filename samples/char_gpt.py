"""A small GPT with a loop of its own, in the shape of nanoGPT: batches are drawn at random, steps counted by hand.

azureml-elastic local --nodes 1:3 samples/char_gpt.py --max-iters 400
azureml-elastic local --nodes 1:3 samples/char_gpt.py --max-iters 400 --shard

The lines with ``elastic`` are all that differs from the script for torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from azureml_elastic import train  # elastic

BLOCK, WIDTH = 32, 32


class CharGPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the next byte at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        logits: torch.Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def sharded(model: CharGPT) -> nn.Module:
    """Shard each layer, then what is left."""
    for layer in model.blocks.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="text to learn")
    parser.add_argument("--max-iters", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=12, help="blocks of a step on each rank")
    parser.add_argument("--shard", action="store_true", help="shard the model with FSDP2 instead of replicating it")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    parser.add_argument("--draws", type=Path, help="folder for a record of what was drawn")
    options = parser.parse_args()

    torch.set_num_threads(1)
    run = train.start()  # elastic: in place of init_process_group("gloo")
    torch.manual_seed(1337 + dist.get_rank())
    data = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - BLOCK, (options.batch_size,))
        if options.draws:
            with (options.draws / f"draws.{os.getpid()}").open("a") as file:
                file.write(json.dumps(starts.tolist()) + "\n")
        return (
            torch.stack([data[start : start + BLOCK] for start in starts]),
            torch.stack([data[start + 1 : start + 1 + BLOCK] for start in starts]),
        )

    model = sharded(CharGPT()) if options.shard else DistributedDataParallel(CharGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    iter_num = run.track(model=model, optimizer=optimizer)  # elastic: in place of 0
    while iter_num < options.max_iters:
        x, y = get_batch()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        iter_num += 1
        if dist.get_rank() == 0 and iter_num % 50 == 0:
            print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
        time.sleep(options.pause)
        run.commit()  # elastic


if __name__ == "__main__":
    main()
