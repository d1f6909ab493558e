"""The agreement of a replica's ranks, before each update of a sharded model, that all of them can complete the step.

A rank that has all gradients of a step can complete it alone. Without an agreement, when another replica is lost, some
ranks of this one may have their gradients while the exchange of others' has failed: neither the step before nor this
one would then be whole in what is left. So the ranks of a replica wait for each other first, and either all of them
complete the step or none does. The wait is for peers of the same replica, mostly on the same node. The connections of
this group are therefore left alone when the round ends (:meth:`ProcessGroups.abort`): the agreement is completed where
it can be, and a peer that cannot take part closes them by its exit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from azureml_elastic.distributed.process_groups import ProcessGroups

__all__ = ["ReplicaGroup"]


class ReplicaGroup:
    """The ranks of this process's replica.

    Args:
        groups: process groups of the round.
        replicas: ranks of each replica; the same on all ranks.
    """

    def __init__(self, groups: ProcessGroups, replicas: Sequence[Sequence[int]]) -> None:
        self._group: dist.ProcessGroup | None = None
        with groups.sparing():
            for ranks in replicas:  # each rank takes part in making each group
                made = dist.new_group([*ranks], backend="gloo")
                if groups.identity.rank in ranks:
                    self._group = made

    def agree(self) -> None:
        """Wait until all ranks of the replica have their gradients. A collective of them.

        Raises:
            RuntimeError: one of them was lost, or cannot complete the step.
        """
        dist.all_reduce(torch.zeros(1), group=self._group)
