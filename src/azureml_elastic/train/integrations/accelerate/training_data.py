"""The loaders whose data the session divides among the ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

__all__ = ["obstacle"]

_SHARDING = {
    "FSDP": "FSDP shards the model",
    "MEGATRON_LM": "Megatron-LM has checkpoints of its own",
    "XLA": "the device is an XLA device",
}


def obstacle(accelerator: Any, loader: DataLoader[Any]) -> str | None:
    """Return why training data are left to accelerate alone, ``None`` if they are not or are none."""
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is an IterableDataset, whose samples have no index"
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return None
    reasons = {
        _SHARDING.get(accelerator.distributed_type.value): True,
        "dispatch_batches=True has rank 0 read all data": bool(accelerator.dispatch_batches),
        "the loader has a batch sampler of its own": loader.batch_size is None,
        f"the loader has a {type(sampler).__name__}": type(sampler) is not RandomSampler,
        "the sampler draws with replacement": bool(getattr(sampler, "replacement", False)),
    }
    return next((text for text, applies in reasons.items() if text is not None and applies), None)
