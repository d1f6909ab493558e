"""The batch sizes of a DeepSpeed configuration, in samples, which are meant for one number of ranks.

DeepSpeed requires that the batch of a rank, the accumulation and the number of ranks multiply to the global batch
(``deepspeed/runtime/config.py``). A script's configuration is that of a run with all nodes; with fewer, the global
batch stays, and ranks accumulate more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from azureml_elastic.errors import UsageError

GLOBAL_BATCH = "train_batch_size"
_MICRO, _ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OURS = ("elasticity", "nebula")
"""Blocks that this library replaces; newer releases of DeepSpeed refuse them."""

_WITH_BUFFERS = 2
"""Least accumulation for which DeepSpeed allocates buffers for sums: another number of ranks may need them."""


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
    accumulation = sizes.accumulation if ranks == 1 else max(_WITH_BUFFERS, sizes.accumulation)
    return {**rest, _MICRO: sizes.micro_batch, _ACCUMULATION: accumulation}


def show(engine: Any, sizes: BatchSizes) -> None:
    """Have an engine name the batch sizes that the script has configured, by which it counts."""
    engine.gradient_accumulation_steps = lambda: sizes.accumulation
    engine.train_batch_size = lambda: sizes.global_batch


def config_for(
    config: Mapping[str, Any], global_batch_size: int, world_size: int, micro_batch_size: int | None = None
) -> dict[str, Any]:
    """Return a copy of a configuration with the batch sizes of a world size, see ``run.deepspeed_config()``.

    In an elastic run the number of ranks changes, and their shares may differ by one sample. These numbers are
    therefore nominal: the loader divides the samples, and ``run.backward()`` weights them.

    Raises:
        UsageError: the configuration has another global batch, or an accumulation that the loader does not have.
    """
    configured = config.get(GLOBAL_BATCH, "auto")
    if configured not in ("auto", global_batch_size):
        raise UsageError(
            f"The configuration's {GLOBAL_BATCH} is {configured}, but the loader's global batch is "
            f"{global_batch_size}. Remove it, or make them equal."
        )
    if config.get(_ACCUMULATION, "auto") not in ("auto", 1) and micro_batch_size is None:
        raise UsageError(
            f"The configuration's {_ACCUMULATION} is {config[_ACCUMULATION]}; run.loader() yields the batch of a whole "
            "optimizer step unless it has a micro_batch_size. Give that to both, or remove the field."
        )
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _OURS}
    share = -(-global_batch_size // world_size)
    micro = min(micro_batch_size or share, share)
    batches = 1 if micro_batch_size is None else max(_WITH_BUFFERS, -(-share // micro))
    return {**result, _MICRO: micro, _ACCUMULATION: batches, GLOBAL_BATCH: micro * batches * world_size}


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value in (None, "auto") else int(value)
