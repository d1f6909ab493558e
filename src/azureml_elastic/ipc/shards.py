"""Descriptions of snapshot shards, as workers, agents and files on a node's disk exchange them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from azureml_elastic.ipc.message import Count, FileName, Text

__all__ = ["HeldShard", "ShardDescription"]


@dataclass(frozen=True)
class ShardDescription:
    """A shard of a snapshot.

    Args:
        folder: name of the snapshot.
        file: file name of the shard in a checkpoint.
        step: optimizer steps completed.
        world_size: world size of the round that took the snapshot, which is the number of its shards.
        rank: rank whose shard it is.
        size: size of the file in bytes.
        tail: size in bytes of what follows the file: the manifest, in the shard of rank 0.
        xxh3: XXH3-128 checksum of the file, in hexadecimal digits.
    """

    folder: FileName
    file: FileName
    step: Count
    world_size: Count
    rank: Count
    size: Count
    tail: Count
    xxh3: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class HeldShard(ShardDescription):
    """A shard in the memory or on the disk of a node.

    Args:
        path: path of the memory or of the file on that node.
    """

    path: Text
