"""A DeepSpeed configuration for the current world size.

DeepSpeed requires three numbers whose product is the global batch: batch of a rank, accumulation, number of ranks. In
an elastic run the number of ranks changes, and their shares may differ by one sample. These numbers are therefore
nominal: the loader divides the samples, and ``run.backward()`` weights them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from azureml_elastic.errors import UsageError

__all__ = ["config_for"]

_BATCH, _MICRO, _ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

_OURS = ("elasticity", "nebula")
"""Blocks that this library replaces; newer releases of DeepSpeed refuse them."""


def config_for(
    config: Mapping[str, Any], global_batch_size: int, world_size: int, micro_batch_size: int | None = None
) -> dict[str, Any]:
    """Return a copy of a configuration with the batch sizes of a world size, see ``run.deepspeed_config()``."""
    configured = config.get(_BATCH, "auto")
    if configured not in ("auto", global_batch_size):
        raise UsageError(
            f"The configuration's {_BATCH} is {configured}, but the loader's global batch is {global_batch_size}. "
            "Remove it, or make them equal."
        )
    if config.get(_ACCUMULATION, "auto") not in ("auto", 1) and micro_batch_size is None:
        raise UsageError(
            f"The configuration's {_ACCUMULATION} is {config[_ACCUMULATION]}; run.loader() yields the batch of a whole "
            "optimizer step unless it has a micro_batch_size. Give that to both, or remove the field."
        )
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _OURS}
    share = -(-global_batch_size // world_size)
    micro = min(micro_batch_size or share, share)
    # DeepSpeed allocates buffers for sums if there is more than one, which another world size may need.
    batches = 1 if micro_batch_size is None else max(2, -(-share // micro))
    return {**result, _MICRO: micro, _ACCUMULATION: batches, _BATCH: micro * batches * world_size}
