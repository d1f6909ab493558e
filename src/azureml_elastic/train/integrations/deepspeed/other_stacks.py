"""Engines that accelerate makes, for its own loops and those of ``transformers.Trainer``.

The stack drives them, and its integration divides the data; they get batch sizes that fit any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from azureml_elastic.train.integrations.deepspeed.batch_sizes import BatchSizes

__all__ = ["batch_sizes", "prepares_engine", "preparing"]

_preparing: ContextVar[bool] = ContextVar("preparing", default=False)

_NUMBERS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@contextmanager
def preparing() -> Iterator[None]:
    """Take the engines that are made in this context for those of another stack."""
    token = _preparing.set(True)
    try:
        yield
    finally:
        _preparing.reset(token)


def prepares_engine() -> bool:
    """Return whether another stack makes an engine."""
    return _preparing.get()


def batch_sizes(config: Mapping[str, Any], ranks: int) -> BatchSizes:
    """Return what a configuration means that a stack has completed for the present number of ranks.

    Args:
        config: DeepSpeed's configuration
        ranks: number of ranks for which the script's batch sizes are meant
    """
    micro, accumulation = (int(config[name]) for name in _NUMBERS)
    return BatchSizes(micro * accumulation * ranks, micro, accumulation)
