"""The batch sizes of a DeepSpeed configuration, which are meant for one number of ranks.

DeepSpeed requires that the batch of a rank, the accumulation and the number of ranks multiply to the global batch. A
script's configuration is that of a run with all nodes; with fewer, the global batch stays, and ranks accumulate more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from azureml_elastic.errors import UsageError

GLOBAL_BATCH = "train_batch_size"
_MICRO, _ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OURS = ("elasticity", "nebula")
"""Blocks that this library replaces; newer releases of DeepSpeed refuse them."""


@dataclass(frozen=True)
class BatchSizes:
    """Numbers of samples and batches of an optimizer step.

    Args:
        micro_batch: samples of a forward pass of a rank, and their limit at any number of ranks.
        accumulation: batches of a rank at the reference number of ranks.
    """

    global_batch: int
    micro_batch: int
    accumulation: int


def batch_sizes(config: Mapping[str, Any], ranks: int) -> BatchSizes | None:
    """Return the batch sizes that a configuration means for a number of ranks.

    Returns:
        ``None`` if it has too few numbers, which DeepSpeed refuses.

    Raises:
        UsageError: the numbers contradict each other.
    """
    batch, micro, accumulation = (_number(config, name) for name in (GLOBAL_BATCH, _MICRO, _ACCUMULATION))
    if batch is None:
        if micro is None:
            return None
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        return BatchSizes(batch, -(-batch // (ranks * accumulation)), accumulation)
    if accumulation is None:
        return BatchSizes(batch, micro, -(-batch // (micro * ranks)))
    if micro * accumulation * ranks != batch:
        raise UsageError(
            f"{GLOBAL_BATCH} is {batch}, but {_MICRO} ({micro}) x {_ACCUMULATION} ({accumulation}) x {ranks} ranks, as "
            f"many as the run has with all its nodes, is {micro * accumulation * ranks}. Remove {_ACCUMULATION}, or "
            "make them equal."
        )
    return BatchSizes(batch, micro, accumulation)


def for_engine(config: Mapping[str, Any], sizes: BatchSizes, ranks: int) -> dict[str, Any]:
    """Return a configuration that DeepSpeed accepts at any number of ranks; it was meant for this number."""
    rest = {key: value for key, value in config.items() if key not in (*_OURS, GLOBAL_BATCH)}
    # DeepSpeed allocates buffers for sums if there is more than one batch, which fewer ranks have.
    accumulation = sizes.accumulation if ranks == 1 else max(2, sizes.accumulation)
    return {**rest, _MICRO: sizes.micro_batch, _ACCUMULATION: accumulation}


def show(engine: Any, sizes: BatchSizes) -> None:
    """Have an engine name the batch sizes that the script has configured, by which it counts."""
    engine.gradient_accumulation_steps = lambda: sizes.accumulation
    engine.train_batch_size = lambda: sizes.global_batch


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value in (None, "auto") else int(value)
