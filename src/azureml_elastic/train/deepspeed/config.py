"""A DeepSpeed configuration for the world size at hand.

DeepSpeed wants three numbers whose product is the global batch: batch of a rank, accumulation, ranks. An elastic run
has a global batch that stays, over ranks that come and go, and shares that may differ by one sample. So the numbers are
nominal here: the loader deals out the real ones, and ``run.backward()`` weighs them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from azureml_elastic.errors import UsageError

__all__ = ["config_for"]

_BATCH, _MICRO, _ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

_OURS = ("elasticity", "nebula")
"""What this library does instead; newer releases of DeepSpeed refuse it."""


def config_for(config: Mapping[str, Any], global_batch_size: int, world_size: int) -> dict[str, Any]:
    """Return a copy of a configuration with the batch sizes of this world.

    Args:
        config: DeepSpeed's; its ``elasticity`` and ``nebula`` blocks are left out.
        global_batch_size: samples of one optimizer step over all ranks.
        world_size: ranks.

    Raises:
        UsageError: it wants to accumulate gradients, or names another global batch.
    """
    named = config.get(_BATCH, "auto")
    if named not in ("auto", global_batch_size):
        raise UsageError(
            f"The configuration's {_BATCH} is {named}, but the loader's global batch is {global_batch_size}. Remove "
            "it, or make them equal."
        )
    if config.get(_ACCUMULATION, "auto") not in ("auto", 1):
        raise UsageError(
            f"The configuration's {_ACCUMULATION} is {config[_ACCUMULATION]}; run.loader() yields the batch of a whole "
            "optimizer step. Remove it, or set it to 1."
        )
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _OURS}
    micro = -(-global_batch_size // world_size)
    return {**result, _MICRO: micro, _ACCUMULATION: 1, _BATCH: micro * world_size}
