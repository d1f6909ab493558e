"""Folders that no other user of the machine may look into: a table holds the run's key, a snapshot a whole model."""

from __future__ import annotations

from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder and those above it for this user alone, as far as they are missing.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        make_private(folder.parent)  # the mode of a path's missing parents is not that of ``mkdir(mode, parents=True)``
        folder.mkdir(0o700, exist_ok=True)
