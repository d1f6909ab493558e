"""The temporary folder of a node, which the next node on the machine removes if this one is killed.

A node holds the lock of a file in its folder while it lives. The file gets its name after it is locked, so that a file
of this name without a lock always belongs to a node that has ended::

    TMP/elastic-x1y2z3w4/azureml-elastic.lock    locked while the node lives
    TMP/elastic-x1y2z3w4/agent.sock
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from azureml_elastic.file_lock import try_lock

_LOG = logging.getLogger(__name__)

_PREFIX = "elastic-"
_LOCK = "azureml-elastic.lock"

_UNLOCKED_SECONDS = 60.0
"""Age from which an empty folder counts as that of a node that was killed before it created its lock."""


class TemporaryFolder:
    """A new private folder. Before it is created, those of nodes that were killed are removed.

    Attributes:
        path: path of the folder.
    """

    def __init__(self, parent: Path) -> None:
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = -1
        unnamed = self.path / f"{_LOCK}.new"
        try:
            self._lock = try_lock(unnamed)
            unnamed.rename(self.path / _LOCK)
        except OSError as error:  # file systems without locks
            _LOG.info("%s cannot be locked, and stays if this node is killed: %s", self.path, error)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the folders of this user's nodes that have ended without removing them, and return their paths."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it was removed just now
                if (
                    entry.name.startswith(_PREFIX)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                    and _remove(Path(entry.path), entry.stat(follow_symlinks=False).st_mtime)
                ):
                    removed.append(Path(entry.path))
    return removed


def _remove(path: Path, changed: float) -> bool:
    """Remove a folder unless a living node may own it, and return whether it was removed."""
    try:
        lock = try_lock(path / _LOCK, create=False)
    except FileNotFoundError:
        if time.time() - changed < _UNLOCKED_SECONDS:
            return False
        path.rmdir()  # fails unless it is empty: other programs may use the prefix
        return True
    if lock < 0:
        return False
    try:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
    return True
