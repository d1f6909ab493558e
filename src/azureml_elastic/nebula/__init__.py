"""Nebula's interface, on this library's checkpoints: a script that imported ``nebulaml`` changes its import.

::

    import azureml_elastic.nebula as nm

    nm.init(persistent_storage_path="/mnt/checkpoints")
    nm.Checkpoint("global_step100").save("model", model.state_dict())
    ...
    latest = nm.get_latest_checkpoint()
    if latest is not None:
        model.load_state_dict(latest.load("model"))

Nebula was removed from Azure's images and from DeepSpeed. It kept checkpoints in memory and persisted some of them;
here each one is persisted in the background. As with Nebula, a checkpoint is listed only once all of its files are
written, and loaded files are verified by checksum. For elastic runs use ``azureml_elastic.train``, which also
restores the position in the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.errors import UsageError
from azureml_elastic.nebula.checkpoint import Checkpoint, Service, complete, current, folder_in, serve

__all__ = [
    "Checkpoint",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "list_checkpoints",
    "policy",
    "wait",
]


def init(
    persistent_storage_path: str | None = None,
    persistent_time_interval: float | None = None,  # noqa: ARG001 - part of Nebula's interface
    *,
    num_of_version_in_retention: int = 2,
) -> None:
    """Set the folder of the checkpoints. With several ranks, call it on all after ``init_process_group``.

    Args:
        persistent_storage_path: folder, mount that all nodes see, or URL such as ``abfs://…``; ``./checkpoints`` by
            default. The checkpoints are in its subfolder ``nebula``.
        persistent_time_interval: ignored: every checkpoint is persisted at once.
        num_of_version_in_retention: number of complete checkpoints to keep.

    Raises:
        UsageError: the number of checkpoints to keep is below 1.
        OSError: the folder cannot be created.
    """
    if num_of_version_in_retention < 1:
        raise UsageError(f"num_of_version_in_retention is {num_of_version_in_retention}; at least 1 is kept.")
    serve(Service(persistent_storage_path or "checkpoints", num_of_version_in_retention))


def list_checkpoints(persist_path: str | None = None) -> list[Checkpoint]:
    """Return the complete checkpoints, the oldest first, in ``persist_path`` or the folder of :func:`init`."""
    storage = current().storage if persist_path is None else folder_in(persist_path)
    return [Checkpoint.of(storage, manifest) for manifest in complete(storage)]


def get_checkpoint(tag: str, persist_path: str | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint of a tag, ``None`` where there is none."""
    return next((each for each in reversed(list_checkpoints(persist_path)) if each.tag == tag), None)


def get_latest_checkpoint(persist_path: str | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint, ``None`` where there is none."""
    return next(reversed(list_checkpoints(persist_path)), None)


def get_latest_checkpoint_path(name: str, persist_path: str | None = None) -> str | None:
    """Return the path of a file in the newest complete checkpoint that has it, ``None`` where there is none."""
    found = (each.path(name) for each in reversed(list_checkpoints(persist_path)) if name in each.files)
    return next(found, None)


def wait() -> None:
    """Wait until all files are written. With several ranks, call it before ``destroy_process_group``.

    Raises:
        CheckpointError: a file could not be written.
    """
    current().wait()


def policy(config: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Return the checkpoint policy in the ``nebula`` block of a DeepSpeed configuration, for ``train.start()``.

    Args:
        config: DeepSpeed configuration, or the block alone: ``enabled``, ``persistent_storage_path``,
            ``persistent_time_interval`` in seconds, ``num_of_version_in_retention``. ``enable_nebula_load`` is
            ignored: a saved state is always restored.

    Returns:
        The policy, ``None`` where the block is missing or not enabled.
    """
    block = config.get("nebula", config if "enabled" in config else {})
    if not block.get("enabled", False):
        return None
    return CheckpointPolicy(
        path=block.get("persistent_storage_path"),
        every=timedelta(seconds=block.get("persistent_time_interval", 100)),
        keep=max(2, block.get("num_of_version_in_retention", 2)),
    )
