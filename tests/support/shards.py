"""Snapshot shards in memory."""

from __future__ import annotations

import os

import torch
import xxhash

from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.train.agent_client.standalone import StandaloneAgent

TENSORS = {
    "nothing first": torch.empty(0),
    "weights": torch.randn(30, 5),
    "half": torch.randn(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
    "strided": torch.arange(12).reshape(3, 4).t(),
    "large": torch.arange(1000.0),
    "last": torch.randn(2, dtype=torch.float64),
}


def describe(folder, content, tail=b"", rank=0, **changed):
    """Return the description of a shard with this content, or of what is ``changed`` of it."""
    fields = {
        "folder": folder,
        "file": f"rank-{rank:05}.safetensors",
        "step": 1,
        "world_size": 1,
        "rank": rank,
        "size": len(content),
        "tail": len(tail),
        "xxh3": xxhash.xxh3_128_hexdigest(content),
    }
    return ShardDescription(**{**fields, **changed})


class RefusingAgent(StandaloneAgent):
    """An agent that refuses commits by an error, if it has one."""

    def __init__(self, storage, refusal=None):
        super().__init__(storage, WorkerIdentity(1, 0, 2, 0))  # without a SIGTERM handler
        self.refusal = refusal

    def commit(self, reference, stall_seconds):
        if self.refusal is not None:
            raise self.refusal
        super().commit(reference, stall_seconds)


def by_name(snapshot):
    """Return the tensors of a snapshot by their names."""
    return {chunk.name: tensor for chunk, tensor in snapshot.tensors.items()}


def memory_of(content):
    """Return the descriptor of new memory with this content."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor
