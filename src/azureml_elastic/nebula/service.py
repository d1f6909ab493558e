"""The storage of checkpoints of Nebula's interface, and the thread that writes them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from azureml_elastic.checkpoint.format.catalogue import survey
from azureml_elastic.checkpoint.format.manifest import MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.locations import join_path, open_storage
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointError

__all__ = ["STATE", "Service", "complete", "folder_in", "retire"]

_LOG = logging.getLogger(__name__)

_FOLDER = "nebula"
"""Subfolder of the given path: checkpoints of other kinds have other retention rules."""

STATE = "nebula"
"""Key in the state of a manifest that marks these checkpoints."""


class Service:
    """Writer of checkpoints below a path or URL, created by ``init()``. With several ranks a collective.

    Attributes:
        keep: number of complete checkpoints to keep.
        storage: storage of the checkpoints.
        control: control group of the writing thread, ``None`` for a single rank.
        token: random text, the same on all ranks.
        number: number of the newest checkpoint.
    """

    def __init__(self, where: str, keep: int) -> None:
        self.where = where
        self.keep = keep
        self.storage = folder_in(where)
        self.storage.prepare()
        self.control = ControlGroup() if dist.is_available() and dist.is_initialized() else None
        self.is_main = self.control is None or self.control.rank == 0
        # From here on all ranks count the checkpoints alike, and need no agreement on each one's folder.
        mine = (secrets.token_hex(16), max((found.name.step for found in survey(self.storage)), default=0))
        self.token, self.number = mine if self.control is None else self.control.from_main(mine)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nebula")
        self._tasks: list[tuple[int, Future[None]]] = []

    def submit(self, number: int, task: Callable[..., None], *arguments: Any) -> None:
        """Run a task after all earlier ones, once the earlier checkpoints are written."""
        # This bounds the copies in memory, and raises what has failed since.
        self.wait(before=number)
        self._tasks.append((number, self._pool.submit(task, *arguments)))

    def wait(self, before: int | None = None) -> None:
        """Wait for the tasks of all checkpoints, or of those before a number.

        Raises:
            CheckpointError: a task failed.
        """
        old = [(number, task) for number, task in self._tasks if before is None or number < before]
        self._tasks = [each for each in self._tasks if each not in old]
        errors = [error for _, task in old if (error := task.exception()) is not None]
        if errors:
            raise CheckpointError(f"A checkpoint could not be written to {self.where}: {errors[0]}") from errors[0]

    def at_exit(self) -> None:
        """Wait for all tasks at the end of the process, and log a failure."""
        try:
            self.wait()
        except CheckpointError as error:
            _LOG.error("%s", error)


def folder_in(where: str) -> Storage:
    """Return the storage of these checkpoints below a path or a URL."""
    return open_storage(join_path(where, _FOLDER))


def complete(storage: Storage) -> list[Manifest]:
    """Return the manifests of the complete checkpoints, the oldest first."""
    found = [each.manifest for each in survey(storage) if each.committed and each.problem is None]
    return [manifest for manifest in found if manifest is not None and STATE in manifest.state]


def retire(storage: Storage, keep: int) -> None:
    """Remove all but the newest complete checkpoints, and earlier incomplete ones."""
    kept = {manifest.directory for manifest in complete(storage)[-keep:]}
    for folder in storage.folders():
        # Those after the newest complete one are being written; folders sort by the checkpoints' numbers.
        if FolderName.parse(folder) is not None and folder not in kept and folder < max(kept, default=""):
            storage.remove(folder, MANIFEST)
