"""The folder that is shipped with a job: this library and its start script, in reproducible form.

Azure ML uploads a local input once per content, so the folder must not have anything that changes between two
submissions, such as compiled files. It is cached per user under the hash of its content.
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
_EXCLUDED_PACKAGES = frozenset({"cli", "local", "report", "submit", "testing"})
"""Packages that neither nodes nor training scripts import."""

_EXCLUDED_SUFFIXES = frozenset({".orig", ".pyc", ".pyo", ".rej", ".swp"})
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
"""Modules that a node needs, by distribution name."""


def cache_folder() -> Path:
    """Return the user's cache folder of this library."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / _DISTRIBUTION
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / _DISTRIBUTION / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / _DISTRIBUTION
    return Path.home() / ".cache" / _DISTRIBUTION


def stage_runtime(cache: Path | None = None) -> Path:
    """Return a folder with ``start.py``, ``requirements.json`` and ``site/azureml_elastic``.

    An intact folder of an earlier call is reused; a modified one is written again.

    Args:
        cache: parent folder; ``None`` selects :func:`cache_folder`.

    Raises:
        SubmitError: the folder cannot be written.
    """
    content = _content()
    folder = (cache or cache_folder()) / "runtime" / _digest(content) / _NAME
    try:
        _replace(folder, content, folder.parent.parent)
    except OSError as error:
        raise SubmitError(
            f"The runtime for the nodes cannot be written to {folder} ({error}). Make that folder writable, or set "
            "XDG_CACHE_HOME to another one."
        ) from error
    return folder


def copy_runtime(folder: Path) -> tuple[Path, bool]:
    """Return a copy of the staged folder below ``folder``, and whether it had to be written."""
    copy = folder / _NAME
    if copy.exists() and not (copy / "start.py").exists():
        raise SubmitError(f"{copy} exists and is no copy of the runtime. Move it, or write the job elsewhere.")
    try:
        return copy, _replace(copy, _content(), folder)
    except OSError as error:
        raise SubmitError(
            f"The runtime for the nodes cannot be written to {copy} ({error}). Make that folder writable."
        ) from error


def _replace(folder: Path, content: Mapping[str, bytes], near: Path) -> bool:
    """Atomically replace a folder by files, through one below ``near``; return ``False`` if it has them already."""
    if _matches(folder, content):
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=near))
        try:
            _write(scratch / "new", content)
            if _matches(folder, content):  # written by another process in the meantime
                return False
            if folder.exists():
                folder.rename(scratch / "old")
            (scratch / "new").rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError:
        if _matches(folder, content):  # written by another process between the check and the renaming
            return False
        raise
    return True


def _content() -> dict[str, bytes]:
    """Return the files by their POSIX path."""
    package = Path(azureml_elastic.__file__).parent
    content = {f"site/azureml_elastic/{name}": path.read_bytes() for name, path in _sources(package).items()}
    content["start.py"] = (package / "submit" / "runtime" / "start.py").read_bytes()
    content["requirements.json"] = json.dumps(_requirements(), indent=1, sort_keys=True).encode()
    return content


def _sources(package: Path) -> dict[str, Path]:
    """Return the files that nodes need, without byte code and editors' backups."""
    return {
        relative.as_posix(): package / relative
        for relative in (path.relative_to(package) for path in sorted(package.rglob("*")) if path.is_file())
        if relative.parts[0] not in _EXCLUDED_PACKAGES
        and relative.suffix not in _EXCLUDED_SUFFIXES
        and not any(part == "__pycache__" or part.startswith(".") for part in relative.parts)
    }


def _requirements() -> dict[str, str]:
    """Return pip's requirements by the module that a node must be able to import."""
    try:
        lines = requires(_DISTRIBUTION) or []
    except PackageNotFoundError as error:
        raise SubmitError(
            "azureml-elastic is not installed but runs from a folder, so its requirements are unknown. Install it "
            "(pip install azureml-elastic), or set delivery='environment'."
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
            f"The metadata of the installed azureml-elastic has no requirement for {missing[0]!r}; it is older than "
            "the code. Install azureml-elastic again."
        )
    return needed


def _digest(content: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, data in sorted(content.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:32]


def _matches(folder: Path, content: Mapping[str, bytes]) -> bool:
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    return present.keys() == content.keys() and all(
        path.read_bytes() == content[name] for name, path in present.items()
    )


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
