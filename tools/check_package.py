"""Verify what the built distributions hold: ``python tools/check_package.py FOLDER``.

The wheel has the files of ``src`` and nothing else, ``py.typed`` among them. The source distribution has what is needed
to build and test it. Neither has caches.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "azureml_elastic"
MARKER = f"{PACKAGE}/py.typed"
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
"""Files of the wheel's ``.dist-info``."""
SOURCES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "noxfile.py",
    "pyproject.toml",
    f"src/{MARKER}",
    "tests/conftest.py",
)
"""Some of the files that a source distribution must have."""


def is_cache(name: str) -> bool:
    """Return whether a tool has left the file, which no distribution should have."""
    parts = name.split("/")
    return name.endswith((".pyc", ".pyo")) or any(part == "__pycache__" or part.endswith("_cache") for part in parts)


def source_files(source: Path) -> set[str]:
    """Return the files of the package in the source tree, relative to the folder around it."""
    found = (path.relative_to(source).as_posix() for path in (source / PACKAGE).rglob("*") if path.is_file())
    return {name for name in found if not is_cache(name)}


def wheel_problems(names: Iterable[str], expected: set[str]) -> list[str]:
    """Return what is wrong with the files of a wheel, one sentence each."""
    info = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    library = set(names) - info
    problems = [f"The wheel has {name}, which is not in src." for name in sorted(library - expected)]
    problems += [f"The wheel lacks {name}." for name in sorted((expected | {MARKER}) - library)]
    inside = {name.partition("/")[2] for name in info}
    return problems + [f"The wheel's metadata lack {name}." for name in METADATA if name not in inside]


def source_problems(names: Iterable[str]) -> list[str]:
    """Return what is wrong with the files of a source distribution, one sentence each."""
    inside = {name.partition("/")[2] for name in names}
    problems = [f"The source distribution has {name}." for name in sorted(inside) if is_cache(name)]
    return problems + [f"The source distribution lacks {name}." for name in SOURCES if name not in inside]


def main(arguments: list[str]) -> int:
    """Check both distributions in a folder, print what is wrong, and return the exit code."""
    folder = Path(arguments[0])
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    with tarfile.open(archive) as opened_archive:
        sources = [member.name for member in opened_archive.getmembers() if member.isfile()]
    problems = wheel_problems(names, source_files(ROOT / "src")) + source_problems(sources)
    print("\n".join(problems) or f"{len(names)} files in {wheel.name}, {len(sources)} in {archive.name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
