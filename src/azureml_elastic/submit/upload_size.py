"""What the folder of a job's code has to upload, which is easily more than its author knows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from azureml_elastic.plurals import counted

__all__ = ["describe_upload"]

_LARGE_BYTES = 100e6
_MANY_FILES = 2000
_MOST_FILES = 20_000
"""Files after which none is counted any more."""

_SHOWN = 3


def describe_upload(folder: Path, ignored: Callable[[str], bool]) -> str | None:
    """Return what a folder uploads, by its largest parts, if that is large; otherwise ``None``.

    Args:
        folder: folder of the code.
        ignored: whether a file, by its path in the folder, is not uploaded.
    """
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for relative, nbytes in _files(folder):
        if not ignored(relative):
            part = relative.partition(os.sep)[0] + (os.sep if os.sep in relative else "")
            sizes[part] = sizes.get(part, 0) + nbytes
            counts[part] = counts.get(part, 0) + 1
            if sum(counts.values()) >= _MOST_FILES:
                break
    nbytes, count = sum(sizes.values()), sum(counts.values())
    if nbytes < _LARGE_BYTES and count < _MANY_FILES:
        return None
    # By bytes where there are many, otherwise by files.
    weights = sizes if nbytes >= _LARGE_BYTES else counts
    largest = sorted(weights, key=lambda part: -weights[part])[:_SHOWN]
    parts = ", ".join(f"{part} ({_text(sizes[part])}, {counted(counts[part], 'file')})" for part in largest)
    more = " and more" if count >= _MOST_FILES else ""
    return (
        f"code={str(folder)!r} uploads {_text(nbytes)} in {counted(count, 'file')}{more}, anew whenever one of "
        f"them has changed. The largest parts are {parts}. Name what the job does not need in "
        f"{str(folder / '.amlignore')!r}, or give code= a folder that has the program alone."
    )


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the paths in the folder, and the sizes, of all files; links are followed as by the upload."""
    seen: set[tuple[int, int]] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        found = Path(root).stat()
        if (found.st_dev, found.st_ino) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        for name in files:
            path = Path(root, name)
            with contextlib.suppress(OSError):  # a link that leads nowhere, or a file that has gone
                yield str(path.relative_to(folder)), path.stat().st_size


def _text(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:  # noqa: PLR2004 - the next unit
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} GB"
