"""The file that is sent with a job: this library and its start script as one archive that Python runs.

Azure ML uploads a local input once per content, so the archive must not have anything that changes between two
submissions, such as compiled files or times. It is cached per user under its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import azureml_elastic
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import SubmitError

RUNTIME_FILE = "azureml_elastic_runtime.pyz"
"""Name of the archive."""

_DISTRIBUTION = "azureml-elastic"
_REQUIREMENTS = "requirements.json"
_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time of a ZIP archive."""

_UNIX = 3
_MODE = 0o644
_EXCLUDED_PACKAGES = frozenset({"__main__.py", "cli", "local", "report", "simulate", "submit", "testing"})
"""Packages, and a module, that neither nodes nor training scripts import."""

_EXCLUDED_SUFFIXES = frozenset({".orig", ".pyc", ".pyo", ".rej", ".swp"})
_MODULES = {
    "pydantic": "pydantic",
    "azure-data-tables": "azure.data.tables",
    "azure-identity": "azure.identity",
    "numpy": "numpy",
    "psutil": "psutil",
    "xxhash": "xxhash",
    "torch": "torch",
}
"""Modules that a node needs, by distribution name."""


def stage_runtime(cache: Path | None = None) -> Path:
    """Return the archive, which has ``__main__.py``, ``requirements.json`` and ``site/azureml_elastic``.

    An intact file of an earlier call is reused; a modified one is written again.

    Args:
        cache: parent folder; ``None`` selects the user's cache.

    Raises:
        SubmitError: the file cannot be written.
    """
    data = _archive()
    digest = hashlib.sha256(data).hexdigest()[:32]
    path = (cache or UserEnvironment.read().cache) / "runtime" / digest / RUNTIME_FILE
    try:
        replace_file(path, data)
    except OSError as error:
        raise SubmitError(
            f"The runtime for the nodes cannot be written to {path} ({error}). Make that folder writable, or set "
            "XDG_CACHE_HOME to another one."
        ) from error
    return path


def copy_runtime(folder: Path) -> tuple[Path, bool]:
    """Return a copy of the archive below ``folder``, and whether it had to be written."""
    copy = folder / RUNTIME_FILE
    if copy.exists() and not _is_runtime(copy):
        raise SubmitError(f"{copy} exists and is no copy of the runtime. Move it, or write the job elsewhere.")
    try:
        return copy, replace_file(copy, _archive())
    except OSError as error:
        raise SubmitError(
            f"The runtime for the nodes cannot be written to {copy} ({error}). Make that folder writable."
        ) from error


def _is_runtime(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return _REQUIREMENTS in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def replace_file(path: Path, data: bytes) -> bool:
    """Replace a file atomically, and create its folder; return ``False`` if it has this content already."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of this call alone: two submissions at once would write the same temporary file.
    with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as scratch:
        written = Path(scratch, path.name)
        written.write_bytes(data)
        written.replace(path)
    return True


def _archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(_content().items()):
            # The system would otherwise be that of the submitting machine, and the content another one on Windows.
            entry = zipfile.ZipInfo(name, _TIME)
            entry.create_system, entry.external_attr = _UNIX, _MODE << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _content() -> dict[str, bytes]:
    package = Path(azureml_elastic.__file__).parent
    content = {f"site/azureml_elastic/{name}": path.read_bytes() for name, path in _sources(package).items()}
    content["__main__.py"] = (package / "submit" / "runtime" / "start.py").read_bytes()
    content[_REQUIREMENTS] = json.dumps(_requirements(), indent=1, sort_keys=True).encode()
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
