"""Checks of a job's local files, before they are uploaded, so that each problem is one sentence with a path.

The folder of a job's code may upload more than its author knows, which a warning tells.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from azureml_elastic.errors import SubmitError
from azureml_elastic.plurals import counted
from azureml_elastic.submit.sdk_hooks import ignore_file

_LOG = logging.getLogger(__name__)

SCHEME = re.compile(r"[A-Za-z][\w+.-]+:|/subscriptions/", re.ASCII | re.IGNORECASE)
"""The beginning of what is no local path, an id in the workspace among it; a single letter is a drive of Windows."""

_ADDRESS = re.compile(
    r"(?:azureml:|file:|[a-z][\w+.-]+://|/subscriptions/).*|[\w.-]+[:@][\w.-]+", re.ASCII | re.IGNORECASE
)
_LOOP = "is a link that leads back to a folder that it is in"
_SENT = "is a link to a folder, which azure-ai-ml uploads although the link is ignored"
_OF_CODE = re.compile(r"(?:azureml:)?/subscriptions/|https?://(?!.*\.git\b)", re.IGNORECASE)
_OF_FILES = re.compile(r"azureml:(?=azureml:|/subscriptions/|[\w.-]+@)", re.ASCII | re.IGNORECASE)

_LARGE_BYTES = 100e6
_MANY_FILES = 2000
_SHOWN = 3


def without_scheme(reference: str) -> str:
    """Return a reference as azure-ai-ml takes it.

    In files ``azureml:`` precedes all that is in a workspace. Elsewhere azure-ai-ml knows it before a name with a
    version alone, neither before an id nor before a name with a label.
    """
    return _OF_FILES.sub("", reference)


def checked_code(code: str | os.PathLike[str] | None) -> str | None:
    """Return the code of a job as azure-ai-ml takes it.

    Links to files and folders outside of it are allowed, since what they lead to is uploaded in their place.

    Raises:
        SubmitError: it is no local folder or file, or has something that cannot be uploaded and is not ignored.
    """
    if code is None or _OF_CODE.match(str(code)):
        return None if code is None else without_scheme(str(code))
    if SCHEME.match(str(code)):
        raise SubmitError(
            f"code={str(code)!r} is not supported by azure-ai-ml, which takes a local folder or file. Clone or "
            "download it first, and give the folder."
        )
    folder = Path(code)
    if folder.is_dir():
        _check_folder(folder)
    elif not os.access(folder, os.R_OK):
        raise SubmitError(f"code={str(code)!r} cannot be read. Change its permissions, or give another file.")
    return str(code)


def checked_data(name: str, path: str | os.PathLike[str]) -> None:
    """Check that the local path of an input exists.

    Raises:
        SubmitError: the path is local, and there is nothing.
    """
    given = str(path)
    if not _ADDRESS.fullmatch(given) and not Path(given).exists():
        raise SubmitError(
            f"The input {name!r} has path={given!r}, which does not exist (looked for {Path(given).absolute()}). Give "
            "an existing path, the address of data, as in 'azureml://datastores/...', or the name and version of what "
            "is registered, as in 'azureml:data:1'."
        )


def _check_folder(folder: Path) -> None:
    ignored, base = ignore_file(folder), folder.resolve()

    def ignores(path: Path) -> bool:
        # A pattern such as 'data/' is one of folders, which azure-ai-ml knows by what is in them.
        return any(ignored.is_file_excluded(each) for each in (path, path / "x"))

    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for entry, problem, nbytes in _walk(folder):
        # azure-ai-ml asks this of the folder that a link leads to, not of the link.
        if ignores(entry.resolve() if problem == _LOOP else entry.parent.resolve() / entry.name):
            continue
        inside = entry.relative_to(folder)
        if why := problem or (_SENT if ignores(base / inside) else ""):
            raise _refused(folder, _link_to(entry, folder) if why in (_LOOP, _SENT) else entry, why)
        part = inside.parts[0] + (os.sep if len(inside.parts) > 1 else "")
        sizes[part] += nbytes
        counts[part] += 1
    if sizes.total() >= _LARGE_BYTES or counts.total() >= _MANY_FILES:
        _LOG.warning("%s", _large(folder, sizes, counts))


def _walk(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield what is no folder, with the reason why it cannot be uploaded, empty if it can, and its size.

    Links are followed as by the upload.
    """
    # With each folder those that it is in, not all seen: two links to one folder are uploaded twice, which is no loop.
    pending = [(folder, {_identity(folder.stat())})]
    while pending:
        current, above = pending.pop()
        try:
            entries = sorted(current.iterdir())
        except OSError as error:
            yield current, f"cannot be read ({error.strerror})", 0
            continue
        for entry in entries:
            problem, below, nbytes = _examine(entry, above)
            if below is None:
                yield entry, problem, nbytes
            else:
                pending.append((entry, below))


def _examine(entry: Path, above: set[tuple[int, int]]) -> tuple[str, set[tuple[int, int]] | None, int]:
    """Return why an entry of a folder cannot be uploaded, the folders around its content if it is one, and its size."""
    name = "has a name that is not UTF-8" if not _is_text(entry.name) else ""
    try:
        found = entry.stat()
    except FileNotFoundError:
        return f"is a link to {_shown(entry.readlink())}, which does not exist", None, 0
    except OSError as error:  # a link to itself, or a folder above that may not be searched
        return f"cannot be followed ({error.strerror})", None, 0
    if stat.S_ISDIR(found.st_mode):
        if _identity(found) in above:
            return _LOOP, None, 0
        readable = os.access(entry, os.R_OK | os.X_OK)
        return (name, {*above, _identity(found)}, 0) if readable and not name else (name or "cannot be read", None, 0)
    if not stat.S_ISREG(found.st_mode):
        return "is no file, but a pipe, a socket or a device", None, 0
    return name or ("" if os.access(entry, os.R_OK) else "cannot be read (permission denied)"), None, found.st_size


def _link_to(entry: Path, folder: Path) -> Path:
    return next(each for each in (entry, *entry.parents) if each.is_symlink() or each == folder)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(path: Path) -> str:
    return repr(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _refused(folder: Path, path: Path, problem: str) -> SubmitError:
    ignored = "" if problem in (_LOOP, _SENT) else f", or name it in {_shown(folder / '.amlignore')}"
    return SubmitError(f"The code folder cannot be uploaded: {_shown(path)} {problem}. Correct or remove it{ignored}.")


def _large(folder: Path, sizes: Counter[str], counts: Counter[str]) -> str:
    """Return what a folder uploads, by its largest parts: by bytes where there are many, otherwise by files."""
    largest = (sizes if sizes.total() >= _LARGE_BYTES else counts).most_common(_SHOWN)
    parts = ", ".join(f"{part} ({_text(sizes[part])}, {counted(counts[part], 'file')})" for part, _ in largest)
    return (
        f"code={str(folder)!r} uploads {_text(sizes.total())} in {counted(counts.total(), 'file')}, anew whenever one "
        f"of them has changed. The largest parts are {parts}. Name what the job does not need in "
        f"{str(folder / '.amlignore')!r}, or give code= a folder that has the program alone."
    )


def _text(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:  # noqa: PLR2004 - the next unit
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} GB"
