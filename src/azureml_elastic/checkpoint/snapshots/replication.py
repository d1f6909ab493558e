"""Copies of the state in memory, which outlive a worker, and a node.

Each rank's share is copied as for a checkpoint, but not written to storage. The node's agent holds on to the memory, so
that it is there for the next worker. Another node's memory has it too, so that it is there when this node is lost. Only
when every share of a copy is in both places is the copy before it let go of; where one of that is gone as well, the
committed checkpoint counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from azureml_elastic.checkpoint.format.manifest import Manifest
from azureml_elastic.checkpoint.save.local_shard import ShardCopy
from azureml_elastic.checkpoint.save.staging_buffer import StagingBuffer
from azureml_elastic.distributed.background_task import BackgroundTask, TaskOutcome
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import Agent, Identity

__all__ = ["PeerBuffers", "ReplicationTask", "partners"]

_PIECE_BYTES = 1 << 26


def partners(nodes: Sequence[int]) -> list[int | None]:
    """Return for each rank the one on another node that has a copy of its share, ``None`` where there is one node.

    Args:
        nodes: by rank, a number of its node.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    order = list(members)
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        others = members[order[(order.index(node) + 1) % len(order)]]
        found.append(others[members[node].index(rank) % len(others)] if len(order) > 1 else None)
    return found


class PeerBuffers:
    """Memory for other ranks' shares. As with one's own, a copy is left as it is while the next one is made."""

    def __init__(self) -> None:
        self._areas: dict[tuple[int, int], StagingBuffer] = {}
        self._turn = 0

    def area(self, number: int, nbytes: int) -> StagingBuffer:
        """Return memory for the share of one of them.

        Raises:
            OSError: there is not enough.
        """
        area = self._areas.setdefault((self._turn, number), StagingBuffer(torch.device("cpu")))
        area.reserve(nbytes)
        return area

    def hold(self) -> None:
        """Leave what came last as it is until something else is held."""
        self._turn = 1 - self._turn


@dataclass(frozen=True)
class _Sent:
    """What a rank tells the others of its share."""

    node: int
    error: str | None
    nbytes: int
    description: dict[str, Any]


class ReplicationTask(BackgroundTask):
    """One copy under way.

    Args:
        manifest: of the state, without the files; behind rank 0's share.
        name: of this rank's file, if it were written.
        copy: of this rank's share, ``None`` where there is none.
        error: why there is none.
        identity: of this process.
        inbox: for those of other ranks.
        control: the ranks' agreement, of this thread alone.
        agent: that holds on to it.
    """

    def __init__(
        self,
        manifest: Manifest,
        name: str,
        copy: ShardCopy | None,
        error: str | None,
        *,
        identity: Identity,
        inbox: PeerBuffers,
        control: ControlGroup,
        agent: Agent,
    ) -> None:
        super().__init__()
        self.manifest = manifest
        self.copy = copy
        self._name = name
        self._error = error
        self._identity = identity
        self._inbox = inbox
        self._control = control
        self._agent = agent

    def work(self) -> TaskOutcome:
        """Have it kept here and there."""
        every = self.together(lambda: self._control.gather(self._mine()))
        failed = [f"rank {rank}: {each.error}" for rank, each in enumerate(every) if each.error is not None]
        if failed:
            return TaskOutcome("failed", f"copying failed on {len(failed)} ranks: {'; '.join(failed)}")
        assert self.copy is not None
        targets = partners([each.node for each in every])
        incoming: list[tuple[int, StagingBuffer]] = []
        try:
            sources = [rank for rank, target in enumerate(targets) if target == self._identity.rank]
            incoming = [(rank, self._inbox.area(at, every[rank].nbytes)) for at, rank in enumerate(sources)]
        except OSError as error:
            self._error = f"there is no memory for other nodes' shares: {error}"
        if not self.together(lambda: self._control.all_true(self._error is None)):
            return TaskOutcome("failed", self._error or "another rank has no memory for other nodes' shares")
        self.together(lambda: self._exchange(targets[self._identity.rank], every, incoming))
        try:
            self._agent.hold_shard(self.copy.area.descriptor, every[self._identity.rank].description)
            for rank, area in incoming:
                self._agent.hold_shard(area.descriptor, every[rank].description)
        except ElasticError as error:
            self._error = f"the agent does not keep it: {error}"
        if not self.together(lambda: self._control.all_true(self._error is None)):
            self._agent.discard_snapshot(self.manifest.directory)
            return TaskOutcome("failed", self._error or "another rank's agent does not keep it")
        self._agent.retain_snapshot(self.manifest.directory)
        self._inbox.hold()
        return TaskOutcome("kept")

    def _mine(self) -> _Sent:
        rank, node = self._identity.rank, self._identity.rank - self._identity.local_rank
        if self.copy is None:
            return _Sent(node, self._error or "there is no copy", 0, {})
        description = {
            "folder": self.manifest.directory,
            "file": self._name,
            "step": self.manifest.step,
            "world_size": self.manifest.world_size,
            "rank": rank,
            "size": self.copy.nbytes,
            "tail": self.copy.tail,
            "xxh3": xxhash.xxh3_128_hexdigest(self.copy.area.view(0, self.copy.nbytes)),
        }
        return _Sent(node, None, self.copy.nbytes + self.copy.tail, description)

    def _exchange(
        self, target: int | None, every: Sequence[_Sent], incoming: Sequence[tuple[int, StagingBuffer]]
    ) -> None:
        """Send this rank's share, and receive others, piece by piece."""
        assert self.copy is not None
        mine = every[self._identity.rank].nbytes if target is not None else 0
        longest = max([mine, *(every[rank].nbytes for rank, _ in incoming)])
        group = self._control.group
        for begin in range(0, longest, _PIECE_BYTES):
            under_way = []
            if begin < mine:
                piece = self.copy.area.tensor(begin, min(begin + _PIECE_BYTES, mine))
                under_way.append(dist.isend(piece, dst=target, group=group))
            for rank, area in incoming:
                if begin < every[rank].nbytes:
                    piece = area.tensor(begin, min(begin + _PIECE_BYTES, every[rank].nbytes))
                    under_way.append(dist.irecv(piece, src=rank, group=group))
            for work in under_way:
                if work is not None:
                    work.wait()
