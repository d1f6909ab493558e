"""A language model of GPT-2 small's shape, trained with data parallelism or sharded, with a session or without.

It has the 12 layers and 12 heads of GPT-2 small (Radford et al., 2019), whose width is 768; here it is a quarter of
that, with a quarter of the vocabulary, so that a step on one core takes less than a second.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from turns import TOTAL_STEPS, Turns

LAYERS, HEADS, WIDTH, VOCABULARY, TOKENS = 12, 12, 192, 12_544, 64
BATCH = 1
"""Sentences of a rank in a step."""

CHECKPOINT_STEPS, SNAPSHOT_STEPS = 60, 20


class Block(nn.Module):
    """A layer: attention to earlier tokens, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mixing = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.projections(self.before_attention(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(found.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.mixing(self.before_mixing(x))


class Model(nn.Module):
    """The language model; its input and output embeddings are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.last(x), self.words.weight)


class Sentences(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, sentences: torch.Tensor) -> torch.Tensor:
    predicted = model(sentences[:, :-1])
    return nn.functional.cross_entropy(predicted.flatten(0, 1), sentences[:, 1:].flatten())


def sharded(model: Model) -> Model:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train_with_torch(shards: bool) -> None:
    dist.init_process_group("gloo")
    model = sharded(Model()) if shards else DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    samples, turns = Sentences(), Turns()
    loader = DataLoader(samples, BATCH, sampler=DistributedSampler(samples))
    for sentences in itertools.islice(loader, TOTAL_STEPS):
        turns.step()
        loss_of(model, sentences).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def train_with_session(shards: bool, often: bool) -> None:
    from azureml_elastic import CheckpointPolicy, train

    many = CheckpointPolicy(every=None, every_steps=CHECKPOINT_STEPS, snapshot_every_steps=SNAPSHOT_STEPS)
    run = train.start(many if often else None)
    model = sharded(Model()) if shards else run.wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    turns = Turns()
    loader = run.loader(Sentences(), global_batch_size=BATCH * run.world_size)
    for sentences in itertools.islice(loader, TOTAL_STEPS):
        turns.step()
        run.backward(loss_of(model, sentences))
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
    run.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--session", action="store_true")
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--often", action="store_true", help="with a session: take many checkpoints and snapshots")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.session:
        train_with_session(arguments.shards, arguments.often)
    else:
        train_with_torch(arguments.shards)


if __name__ == "__main__":
    main()
