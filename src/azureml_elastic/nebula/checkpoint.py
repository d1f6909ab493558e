"""A checkpoint of Nebula's interface."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from typing_extensions import Self

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.opening import join_path
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, UsageError
from azureml_elastic.nebula.service import STATE, Service, retire

__all__ = ["Checkpoint", "current", "serve"]

UNTIL_COMMIT = -2
"""Nebula's own number for: as many files as are saved until the commit."""

_LOG = logging.getLogger(__name__)

_SUM = ".sum"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_service: Service | None = None


def serve(service: Service) -> None:
    """Have checkpoints go there from now on."""
    global _service  # noqa: PLW0603 - Nebula's interface has no object to hold it
    if _service is not None:
        _service.wait()
    _service = service


def current() -> Service:
    """Return where they go.

    Raises:
        UsageError: ``init()`` was not called.
    """
    if _service is None:
        raise UsageError("nebula.init() was not called, so there is no place for checkpoints. Call it first.")
    return _service


class Checkpoint:
    """A checkpoint: some files under one tag. All ranks make the same ones, in the same order.

    Args:
        tag: its name; several may have the same, then the newest counts.
        num_of_files: that will be saved under it, by all ranks together; it is complete when they are written.
            ``-2``: it is complete with :meth:`commit`.

    Raises:
        UsageError: :func:`init` was not called.
    """

    def __init__(self, tag: str = "", num_of_files: int = 1) -> None:
        service = current()
        service.number += 1
        number = service.number
        nonce = xxhash.xxh32_hexdigest(f"{service.token}.{number}.{tag}".encode())
        self._set(service.storage, tag or f"checkpoint_{number}", FolderName(number, 0, nonce), num_of_files, {})

    @classmethod
    def of(cls, storage: Storage, manifest: Manifest) -> Self:
        """Return one that is complete."""
        found, name = cls.__new__(cls), FolderName.parse(manifest.directory)
        assert name is not None
        found._set(storage, manifest.state[STATE]["tag"], name, len(manifest.files), manifest.files)  # noqa: SLF001
        return found

    def _set(self, storage: Storage, tag: str, name: FolderName, expected: int, files: Mapping[str, FileSum]) -> None:
        self.tag = tag
        self._storage, self._number, self._folder = storage, name.step, str(name)
        self._expected = expected
        self._written = dict(files)
        self._failed = False

    @property
    def files(self) -> list[str]:
        """The names of its files."""
        return sorted(self._written)

    def __repr__(self) -> str:
        return f"Checkpoint({self.tag!r}, files={self.files})"

    def save(self, name: str, value: Any) -> None:
        """Copy something, and write the copy in the background, as ``torch.save`` would.

        Args:
            name: of the file.
            value: best a state dict: what is pickled with it is loaded only on demand.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
            UsageError: the name is none of a file.
        """
        if not _NAME.fullmatch(name) or name.endswith(_SUM) or name in (MANIFEST, COMMITTED):
            raise UsageError(f"{name!r} cannot be a file's name in a checkpoint: take letters, digits, '.', '_', '-'.")
        copy = io.BytesIO()
        torch.save(value, copy)
        current().submit(self._number, self._write, name, copy)

    def commit(self) -> None:
        """Complete it with the files that were saved until now, on all ranks. With several ranks a collective.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
        """
        current().submit(self._number, self._commit)

    def load(self, name: str, map_location: Any = None, *, weights_only: bool = True) -> Any:
        """Return what was saved under a name.

        Args:
            name: of the file.
            map_location: as in ``torch.load``.
            weights_only: ``False`` also unpickles other objects than tensors and plain values, which can run any
                code: only for files of your own.

        Raises:
            CheckpointDamaged: the file is not what was written.
            UsageError: there is no such file.
        """
        if name not in self._written:
            raise UsageError(f"The checkpoint {self.tag!r} has no {name!r}; it has {', '.join(sorted(self._written))}.")
        try:
            content = self._storage.read(self._folder, name)
        except OSError as error:
            raise CheckpointDamaged(f"{self.path(name)} cannot be read: {error}") from error
        if _sum(content) != self._written[name]:
            raise CheckpointDamaged(f"{self.path(name)} is not what was written: its checksum does not match.")
        return torch.load(io.BytesIO(content), map_location=map_location, weights_only=weights_only)

    def path(self, name: str) -> str:
        """Return the path of a file, or its URL."""
        return join_path(join_path(str(self._storage), self._folder), name)

    def _write(self, name: str, copy: io.BytesIO) -> None:
        try:
            self._storage.make(self._folder)
            self._written[name] = sums = self._storage.write(self._folder, name, [copy.getbuffer()])
            self._storage.publish(self._folder, name + _SUM, json.dumps([sums.size, sums.xxh3]).encode())
        except BaseException:
            self._failed = True  # it is never complete
            raise
        if self._expected != UNTIL_COMMIT and self._is_last():
            self._publish()

    def _is_last(self) -> bool:
        """Whether all files are there, so that this rank completes the checkpoint; maybe others see that as well."""
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
            state={STATE: {"tag": self.tag}},
            data=None,
            torch=str(torch.__version__),
        )
        with contextlib.suppress(FileExistsError):  # another rank has seen the same
            self._storage.publish(self._folder, MANIFEST, manifest.to_bytes())
            self._storage.write(self._folder, COMMITTED, [])
        try:
            retire(self._storage, current().keep)
        except OSError as error:  # it is complete all the same
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self._storage, error)


def _sum(content: bytes) -> FileSum:
    return FileSum(len(content), xxhash.xxh3_128_hexdigest(content))
