"""How a window, the samples of one optimizer step, is divided into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.config import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError

__all__ = ["Batching"]


@dataclass(frozen=True)
class Batching:
    """Division of windows into micro-batches.

    Args:
        policy: batch policy of the run
        micro_batch_size: limit on the samples of a micro-batch, ``None`` for no limit
        micro_batches: number of micro-batches of each rank in each window, whatever their size; those for which there
            are no samples have a weight of 0. ``None`` for as many as the limit and the policy require
        equal_counts: whether all ranks have the same number of micro-batches in each window of an epoch, as training
            stacks with a fixed number of accumulation steps require; those without samples have a weight of 0
    """

    policy: BatchPolicy
    micro_batch_size: int | None = None
    micro_batches: int | None = None
    equal_counts: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} is below the limit of 1; give the samples of a forward pass."
            )
        if self.micro_batches is not None and self.micro_batches < 1:
            raise UsageError(f"micro_batches={self.micro_batches} is below the limit of 1; give the number in a step.")

    @property
    def logical_workers(self) -> int | None:
        """Number of logical workers that share a window, ``None`` to divide it among the ranks."""
        return self.policy.logical_workers if isinstance(self.policy, FixedGlobalBatch) else None

    @property
    def exact(self) -> bool:
        """Whether gradients, and so micro-batches, must be bit-identical at any world size."""
        return isinstance(self.policy, FixedGlobalBatch) and self.policy.reduce == "exact"

    def require_fitting(self, global_batch_size: int) -> None:
        """Raise ``UsageError`` if the policy cannot divide windows of a global batch size."""
        workers = self.logical_workers
        if workers is not None and workers > global_batch_size:
            raise UsageError(
                f"logical_workers={workers} is above global_batch_size={global_batch_size}; each needs a sample."
            )
        if isinstance(self.policy, FixedPerWorkerBatch) and global_batch_size % self.policy.reference_world_size:
            raise UsageError(
                f"global_batch_size={global_batch_size} cannot be divided by "
                f"reference_world_size={self.policy.reference_world_size}, so there is no batch per worker."
            )

    def window_size(self, global_batch_size: int, world_size: int) -> int:
        """Return the number of samples of a step at a world size."""
        if isinstance(self.policy, FixedPerWorkerBatch):
            return global_batch_size // self.policy.reference_world_size * world_size
        return global_batch_size
