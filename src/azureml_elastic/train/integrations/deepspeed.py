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


def config_for(
    config: Mapping[str, Any], global_batch_size: int, world_size: int, micro_batch_size: int | None = None
) -> dict[str, Any]:
    """Return a copy of a configuration with the batch sizes of this world.

    Args:
        config: DeepSpeed's; its ``elasticity`` and ``nebula`` blocks are left out.
        global_batch_size: samples of one optimizer step over all ranks.
        world_size: ranks.
        micro_batch_size: micro-batch size of the loader, if it has one.

    Raises:
        UsageError: it names another global batch, or an accumulation that the loader does not have.
    """
    named = config.get(_BATCH, "auto")
    if named not in ("auto", global_batch_size):
        raise UsageError(
            f"The configuration's {_BATCH} is {named}, but the loader's global batch is {global_batch_size}. Remove "
            "it, or make them equal."
        )
    if config.get(_ACCUMULATION, "auto") not in ("auto", 1) and micro_batch_size is None:
        raise UsageError(
            f"The configuration's {_ACCUMULATION} is {config[_ACCUMULATION]}; run.loader() yields the batch of a whole "
            "optimizer step unless it has a micro_batch_size. Give that to both, or remove the field."
        )
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _OURS}
    share = -(-global_batch_size // world_size)
    micro = min(micro_batch_size or share, share)
    # More than one, where another world may need it: DeepSpeed makes room for sums by it, and has no other use here.
    batches = 1 if micro_batch_size is None else max(2, -(-share // micro))
    return {**result, _MICRO: micro, _ACCUMULATION: batches, _BATCH: micro * batches * world_size}
