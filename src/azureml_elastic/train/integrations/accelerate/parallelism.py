"""What a script has accelerate shard: the sizes of its ``ParallelismConfig`` in a round, and what is left alone."""

from __future__ import annotations

import logging
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.plurals import counted
from azureml_elastic.train.session.stack_session import StackSession

__all__ = ["fit_to_round", "obstacle"]

_LOG = logging.getLogger(__name__)

_SHARDING = {
    "MEGATRON_LM": "Megatron-LM has checkpoints of its own",
    "XLA": "the device is an XLA device",
}


def obstacle(accelerator: Any) -> str | None:
    """Return why the model of an accelerator is left to the stack alone, ``None`` if it is not."""
    if accelerator.distributed_type.value == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        return "FSDP version 1 shards the model"
    config = getattr(accelerator, "parallelism_config", None)  # not in accelerate before 1.9
    if config is not None and config.non_data_parallel_size > 1:
        return "several ranks compute the same samples, by tensor, context or sequence parallelism"
    return _SHARDING.get(accelerator.distributed_type.value)


def fit_to_round(session: StackSession, config: Any) -> None:
    """Set the numbers of replicas and shards to those of the round: accelerate refuses others than there are ranks.

    A collective, where the script has replicas that are sharded.

    Args:
        session: session
        config: the script's ``ParallelismConfig``, before it makes its mesh

    Raises:
        UsageError: the replicas of the round cannot be sharded.
    """
    if config.total_size == 1 or config.non_data_parallel_size > 1:
        return
    replicas, shards = 1, session.world_size
    if config.dp_shard_size == 1:
        replicas, shards = session.world_size, 1
    elif config.dp_replicate_size > 1:
        replicas, shards = session.replicas_and_shards()
        if shards == 1 and replicas > 1:
            raise UsageError(
                f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}, dp_shard_size="
                f"{config.dp_shard_size}) shards each replica, but those of this run have {counted(shards, 'worker')} "
                "each. Give ElasticDistribution(nodes_per_replica=...) or process_count_per_instance a larger number."
            )
    if (config.dp_replicate_size, config.dp_shard_size) != (replicas, shards) and session.is_main:
        _LOG.info("ParallelismConfig has %d replicas of %d shards in this round.", replicas, shards)
    config._set_size("dp_replicate", replicas)  # noqa: SLF001
    config._set_size("dp_shard", shards)  # noqa: SLF001
