"""The ``Checkpoint`` class of Nebula's interface, and the service that writes checkpoints."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from typing_extensions import Self

from azureml_elastic.checkpoint.format.catalogue import survey
from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.locations import join_path, open_storage
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, UsageError

_LOG = logging.getLogger(__name__)

_UNTIL_COMMIT = -2
"""Value of Nebula's ``num_of_files`` for checkpoints that :meth:`Checkpoint.commit` completes."""

_SUM = ".sum"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_FOLDER = "nebula"
"""Subfolder of the given path: checkpoints of other kinds have other retention rules."""

_STATE = "nebula"
"""Key in the state of a manifest that marks these checkpoints."""


class Service:
    """Writer of checkpoints below a path or URL, created by ``init()``. With several ranks a collective.

    Attributes:
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
    return [manifest for manifest in found if manifest is not None and _STATE in manifest.state]


def _retire(storage: Storage, keep: int) -> None:
    """Remove all but the newest complete checkpoints, and earlier incomplete ones."""
    kept = {manifest.directory for manifest in complete(storage)[-keep:]}
    for folder in storage.folders():
        # Those after the newest complete one are being written; folders sort by the checkpoints' numbers.
        if FolderName.parse(folder) is not None and folder not in kept and folder < max(kept, default=""):
            storage.remove(folder, MANIFEST)


_service: Service | None = None


def serve(service: Service) -> None:
    """Set the service of all later checkpoints."""
    global _service  # noqa: PLW0603 - Nebula's interface has no object to hold it
    if _service is not None:
        _service.wait()
    _service = service
    atexit.register(service.at_exit)


def current() -> Service:
    """Return the service of the checkpoints.

    Raises:
        UsageError: ``init()`` was not called.
    """
    if _service is None:
        raise UsageError("nebula.init() was not called, so there is no folder for checkpoints. Call it first.")
    return _service


class Checkpoint:
    """A checkpoint: files under one tag. All ranks create the same checkpoints, in the same order.

    Args:
        tag: name of the checkpoint; of several with the same name the newest is used.
        num_of_files: number of files that all ranks together save; the checkpoint is complete once they are written.
            ``-2`` for a checkpoint that :meth:`commit` completes.

    Raises:
        UsageError: :func:`init` was not called.
    """

    def __init__(self, tag: str = "", num_of_files: int = 1) -> None:
        service = current()
        service.number += 1
        number = service.number
        nonce = xxhash.xxh32_hexdigest(f"{service.token}.{number}.{tag}".encode())
        folder = str(FolderName(number, 0, nonce))
        self._set(service.storage, tag or f"checkpoint_{number}", number, folder, num_of_files, {})

    @classmethod
    def of(cls, storage: Storage, manifest: Manifest) -> Self:
        """Return a complete checkpoint."""
        found, tag, files = cls.__new__(cls), manifest.state[_STATE]["tag"], manifest.files
        found._set(storage, tag, manifest.step, manifest.directory, len(files), files)  # noqa: SLF001
        return found

    def _set(
        self, storage: Storage, tag: str, number: int, folder: str, expected: int, files: Mapping[str, FileSum]
    ) -> None:
        self.tag, self._storage, self._number, self._folder, self._expected = tag, storage, number, folder, expected
        self._written, self._failed = dict(files), False

    @property
    def files(self) -> list[str]:
        """The names of the files."""
        return sorted(self._written)

    def __repr__(self) -> str:
        return f"Checkpoint({self.tag!r}, files={self.files})"

    def save(self, name: str, value: Any) -> None:
        """Copy a value, and write the copy in the background in the format of ``torch.save``.

        Args:
            value: preferably a state dict: other pickled objects are loaded on demand only.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
            UsageError: the name is not valid for a file.
        """
        if not _NAME.fullmatch(name) or name.endswith(_SUM) or name in (MANIFEST, COMMITTED):
            raise UsageError(f"{name!r} cannot be a file's name in a checkpoint: take letters, digits, '.', '_', '-'.")
        copy = io.BytesIO()
        torch.save(value, copy)
        current().submit(self._number, self._write, name, copy)

    def commit(self) -> None:
        """Complete the checkpoint with the files that all ranks have saved. With several ranks a collective.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
        """
        current().submit(self._number, self._commit)

    def load(self, name: str, map_location: Any = None, *, weights_only: bool = True) -> Any:
        """Return the value of a file.

        Args:
            map_location: device mapping of ``torch.load``.
            weights_only: ``False`` to unpickle objects other than tensors and plain values, which can run any code;
                for trusted files only.

        Raises:
            CheckpointDamaged: the file is damaged.
            UsageError: the checkpoint has no such file.
        """
        if name not in self._written:
            raise UsageError(f"The checkpoint {self.tag!r} has no {name!r}; it has {', '.join(sorted(self._written))}.")
        try:
            content = self._storage.read(self._folder, name)
        except OSError as error:
            raise CheckpointDamaged(f"{self.path(name)} cannot be read: {error}") from error
        if FileSum(len(content), xxhash.xxh3_128_hexdigest(content)) != self._written[name]:
            raise CheckpointDamaged(f"{self.path(name)} is not what was written: its checksum does not match.")
        return torch.load(io.BytesIO(content), map_location=map_location, weights_only=weights_only)

    def path(self, name: str) -> str:
        """Return the path or URL of a file."""
        return join_path(join_path(str(self._storage), self._folder), name)

    def _write(self, name: str, copy: io.BytesIO) -> None:
        try:
            self._storage.make(self._folder)
            # The sums last, so that a rank that counts them counts complete files alone.
            self._written[name] = sums = self._storage.write(self._folder, name, [copy.getbuffer()])
            self._storage.publish(self._folder, name + _SUM, json.dumps([sums.size, sums.xxh3]).encode())
        except BaseException:
            self._failed = True  # the checkpoint is never completed
            raise
        if self._expected != _UNTIL_COMMIT and self._is_last():
            self._publish()

    def _is_last(self) -> bool:
        """Return whether all files exist, so that this rank completes the checkpoint; others may as well."""
        names = [name for name in self._storage.files(self._folder) if name.endswith(_SUM)]
        if len(names) < self._expected:
            return False
        for name in names:
            size, xxh3 = json.loads(self._storage.read(self._folder, name))
            self._written[name.removesuffix(_SUM)] = FileSum(size, xxh3)
        return True

    def _commit(self) -> None:
        service = current()
        parts = [(self._failed, self._written)]
        if service.control is not None:
            parts = service.control.gather(parts[0])
        for _, written in parts:
            self._written.update(written)
        failed = [rank for rank, (failed, _) in enumerate(parts) if failed]
        if failed:
            raise CheckpointError(f"{self.tag!r} is not complete: ranks {failed} could not write a file of it.")
        if service.is_main:
            self._publish()

    def _publish(self) -> None:
        manifest = Manifest(
            directory=self._folder,
            step=self._number,
            round=0,
            world_size=1,
            parent=None,
            files=dict(sorted(self._written.items())),
            state={_STATE: {"tag": self.tag}},
            data=None,
            torch=str(torch.__version__),
        )
        with contextlib.suppress(FileExistsError):  # another rank has completed it
            self._storage.publish(self._folder, MANIFEST, manifest.to_bytes())
            self._storage.write(self._folder, COMMITTED, [])
        try:
            _retire(self._storage, current().keep)
        except OSError as error:  # the checkpoint is complete all the same
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self._storage, error)
