"""Small disks, real ones in memory, and what fills them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNT = shutil.which("mount")


@contextlib.contextmanager
def disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a disk of this size at a new folder; the test is skipped where that is not allowed."""
    folder.mkdir()
    mounted = MOUNT is not None and os.geteuid() == 0
    if (
        not mounted
        or subprocess.run([MOUNT, "-t", "tmpfs", "-o", f"size={mib}m", "none", folder], check=False).returncode
    ):
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    """Fill the disk of a folder."""
    with contextlib.suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def fill_for(folder: Path, seconds: float) -> None:
    """Fill the disk of a folder for a while."""
    fill(folder)
    time.sleep(seconds)
    (folder / "filling").unlink()
