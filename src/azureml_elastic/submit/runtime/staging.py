"""The folder that a job takes to its nodes: this library and its starter, the same bytes each time.

Azure ML uploads a local input once for each content, so the folder must hold nothing that changes by itself:
no compiled files, no times. It lies in the user's cache under the hash of its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import azureml_elastic
from azureml_elastic.errors import SubmitError

__all__ = ["cache_folder", "copy_runtime", "stage_runtime"]

_DISTRIBUTION = "azureml-elastic"
_NAME = "azureml_elastic_runtime"
_STAYS = frozenset({"cli", "local", "report", "submit", "testing"})
"""Parts of the library that neither nodes nor training scripts import: they are for the machine that submits."""

_LEFT_BEHIND = frozenset({".orig", ".pyc", ".pyo", ".rej", ".swp"})
_MODULES = {
    "pydantic": "pydantic",
    "azure-data-tables": "azure.data.tables",
    "azure-identity": "azure.identity",
    "numpy": "numpy",
    "psutil": "psutil",
    "tenacity": "tenacity",
    "xxhash": "xxhash",
    "torch": "torch",
}
"""What a node needs: distribution to module."""


def cache_folder() -> Path:
    """Return this user's folder for what can be made again."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / _DISTRIBUTION
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / _DISTRIBUTION / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / _DISTRIBUTION
    return Path.home() / ".cache" / _DISTRIBUTION


def stage_runtime(cache: Path | None = None) -> Path:
    """Return a folder that holds ``start.py``, ``requirements.json`` and ``site/azureml_elastic``.

    A second call finds the first one's folder; one that was changed meanwhile is made anew.

    Args:
        cache: where it lies; ``None`` takes :func:`cache_folder`.

    Raises:
        SubmitError: the folder cannot be written.
    """
    content = _content()
    place = (cache or cache_folder()) / "runtime" / _digest(content) / _NAME
    try:
        _put(place, content, place.parent.parent)
    except OSError as error:
        raise SubmitError(
            f"The runtime for the nodes cannot be written to {place} ({error}). Free or permit that folder, or set "
            "XDG_CACHE_HOME to another one."
        ) from error
    return place


def copy_runtime(folder: Path) -> tuple[Path, bool]:
    """Return a copy of the same folder below another one, and whether it had to be written.

    Args:
        folder: below which it lies; made if it is missing.

    Raises:
        SubmitError: something else has the copy's name, or it cannot be written.
    """
    place = folder / _NAME
    if place.exists() and not (place / "start.py").exists():
        raise SubmitError(
            f"{place} is there already and holds something else. Move it away, or write the job elsewhere."
        )
    try:
        return place, _put(place, _content(), folder)
    except OSError as error:
        raise SubmitError(f"The runtime for the nodes cannot be written to {place} ({error}). Permit it.") from error


def _put(place: Path, content: Mapping[str, bytes], near: Path) -> bool:
    """Make a folder hold the content and nothing else, at once; return whether it did not already.

    Args:
        place: the folder.
        content: the files.
        near: a folder on the same disk, where it is prepared.
    """
    if _matches(place, content):
        return False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=near))
        try:
            _write(scratch / "new", content)
            if _matches(place, content):  # another process was faster
                return False
            if place.exists():
                place.rename(scratch / "old")
            (scratch / "new").rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError:
        if _matches(place, content):  # faster still, between the look and the renaming
            return False
        raise
    return True


def _content() -> dict[str, bytes]:
    """Return the files by their path, with slashes."""
    package = Path(azureml_elastic.__file__).parent
    content = {f"site/azureml_elastic/{name}": path.read_bytes() for name, path in _sources(package).items()}
    content["start.py"] = (package / "submit" / "runtime" / "start.py").read_bytes()
    content["requirements.json"] = json.dumps(_requirements(), indent=1, sort_keys=True).encode()
    return content


def _sources(package: Path) -> dict[str, Path]:
    """Return the files that nodes need, but for those that Python and editors leave behind."""
    return {
        relative.as_posix(): package / relative
        for relative in (path.relative_to(package) for path in sorted(package.rglob("*")) if path.is_file())
        if relative.parts[0] not in _STAYS
        and relative.suffix not in _LEFT_BEHIND
        and not any(part == "__pycache__" or part.startswith(".") for part in relative.parts)
    }


def _requirements() -> dict[str, str]:
    """Return the module names that a node must be able to import, each with its requirement for pip."""
    try:
        lines = requires(_DISTRIBUTION) or []
    except PackageNotFoundError as error:
        raise SubmitError(
            "azureml-elastic runs from a folder without being installed, so it cannot tell the nodes what it needs. "
            "Install it (pip install azureml-elastic), or set delivery='environment'."
        ) from error
    needed: dict[str, str] = {}
    for line in lines:
        requirement = line.partition(";")[0].strip()
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        if name in _MODULES:
            needed[_MODULES[name]] = requirement.replace(" ", "")
    missing = sorted(set(_MODULES.values()) - set(needed))
    if missing:
        raise SubmitError(
            f"The installed azureml-elastic does not say which {missing[0]!r} it needs; its metadata is older than "
            "its code. Install it again."
        )
    return needed


def _digest(content: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path in sorted(content):
        digest.update(f"{path}\0{len(content[path])}\0".encode())
        digest.update(content[path])
    return digest.hexdigest()[:32]


def _matches(place: Path, content: Mapping[str, bytes]) -> bool:
    present = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if not path.is_dir()}
    return present.keys() == content.keys() and all(
        path.read_bytes() == content[name] for name, path in present.items()
    )


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
