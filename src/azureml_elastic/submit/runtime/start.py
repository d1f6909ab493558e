"""Start script of a node: makes this library importable, installs missing requirements, and runs the agent.

Python runs this file as ``__main__.py`` of the archive in which the library is sent. It uses the standard library only.
The archive is unpacked once on a node, since modules in an archive are compiled at each import. Missing requirements
are installed into a temporary folder of the node, never into the environment; torch must be part of the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

_NEXT_STEP = (
    "Use an environment that has it, as from pip install 'azureml-elastic[node]', in which case "
    "delivery='environment' may be set too."
)
_TAIL = 15

# What the agent imports late, what the preload server imports after torch, and the rest. A compiled file is replaced
# atomically, so the agent may write the same one meanwhile. Without the site-packages, it starts in no time.
_COMPILE = """
import compileall, os, sys
os.nice(5)
for part in ("node", "train", "."):
    compileall.compile_dir(os.path.join(sys.argv[1], part), quiet=2)
"""


def main(argv: Sequence[str]) -> int:
    """Prepare this process and its children, then run the node's entry point.

    Args:
        argv: arguments of the entry point: its options, ``--``, and the program.
    """
    archive = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != archive]
    folder = unpack(archive, (archive.parent, Path(tempfile.gettempdir())))
    _compile_ahead(folder / "site" / "azureml_elastic")
    _put_on_path(folder / "site")
    needed = json.loads((folder / "requirements.json").read_text(encoding="utf-8"))
    lacking = unmet(needed)
    if "torch" in lacking:
        _fail(f"This node's environment has no {lacking['torch']!r}, which is never installed at start. {_NEXT_STEP}")
    if lacking:
        _put_on_path(_install(sorted(lacking.values())))
        still = unmet(lacking)
        if still:
            _fail(f"{sorted(still.values())} cannot be imported even after installation. {_NEXT_STEP}")
    sys.argv[:] = ["azureml_elastic.node", *argv]
    entry: Callable[[list[str]], int | None] = importlib.import_module("azureml_elastic.node.__main__").main
    return entry(list(argv)) or 0


def unpack(archive: Path, places: Sequence[Path]) -> Path:
    """Unpack the archive into a folder of this node, unless an earlier start has, and return the folder.

    Args:
        places: folders to unpack it in, in the order of preference; the first that can be written is used.
    """
    problems: list[str] = []
    try:
        data = archive.read_bytes()
        # By the content: jobs with other releases of the library may share this machine's folder for temporary files.
        name = f"azureml-elastic-{hashlib.sha256(data).hexdigest()[:16]}"
        with zipfile.ZipFile(io.BytesIO(data)) as files:
            folder = next(filter(None, (_unpack_in(place, name, files, problems) for place in places)), None)
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        _fail(f"The library that was sent with the job is damaged: {archive} ({error}). Submit the job again.")
    if folder is None:
        _fail(
            f"The library that was sent with the job cannot be unpacked ({'; '.join(problems)}). Free space there, or "
            "name another folder by the environment variable TMPDIR."
        )
    return folder


def _unpack_in(place: Path, name: str, files: zipfile.ZipFile, problems: list[str]) -> Path | None:
    """Return the folder of this name with all files; add a problem and return ``None`` if it cannot be written."""
    if _is_own(place / name) and _is_complete(place / name, files):
        return place / name
    try:
        with _scratch(place) as scratch:
            files.extractall(scratch)
            return _publish(scratch, place / name, lambda folder: _is_complete(folder, files))
    except OSError as error:
        problems.append(f"{place}: {error}")
    return None


def _compile_ahead(package: Path) -> None:
    """Let another process compile the library while this one starts, unless an earlier start on this node has.

    The archive has no compiled files: they depend on the node's Python and differ between two compilations. Without
    them, agent and preload server would compile, one after the other, what they import. That is only slower, so no
    error is one of the node's.
    """
    if (
        sys.dont_write_bytecode
        or Path(importlib.util.cache_from_source(str(package / "node" / "__init__.py"))).exists()
    ):
        return
    with contextlib.suppress(OSError):
        compiler = subprocess.Popen(
            [sys.executable, "-S", "-c", _COMPILE, str(package)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=compiler.wait, name="compiler", daemon=True).start()  # leaves no zombie


def _is_complete(folder: Path, files: zipfile.ZipFile) -> bool:
    """Return whether a folder has all files; temporary folders are cleaned by some systems."""
    try:
        return all((folder / entry.filename).stat().st_size == entry.file_size for entry in files.infolist())
    except OSError:
        return False


def unmet(needed: Mapping[str, str]) -> dict[str, str]:
    """Return the requirements that the environment does not satisfy."""
    return {module: requirement for module, requirement in needed.items() if not _is_met(module, requirement)}


def is_satisfied(installed: str, requirement: str) -> bool:
    """Return whether a version is within the bounds of a requirement.

    Args:
        installed: version, such as ``"2.13.0+cpu"``.
        requirement: distribution name with bounds, such as ``"pydantic<3,>=2.8"``.
    """
    have = _release(installed)
    for operator, bound in re.findall(r"(>=|<(?!=))\s*([\d.]+)", requirement):
        wanted = _release(bound)
        length = max(len(have), len(wanted))
        left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (have, wanted))
        if (left < right) == (operator == ">="):
            return False
    return True


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


def _is_met(module: str, requirement: str) -> bool:
    try:
        if importlib.util.find_spec(module) is None:
            return False
    except ModuleNotFoundError:
        return False
    try:
        return is_satisfied(version(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]), requirement)
    except PackageNotFoundError:  # importable without metadata, e.g. built from source in the image
        return True


def _put_on_path(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    # The package cannot be imported before this, so that it uses the environment itself.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([inherited] if inherited else [])])
    importlib.invalidate_caches()


def _install(requirements: Sequence[str]) -> Path:
    # Another Python of the same image needs packages of its own.
    name = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"azureml-elastic-{name}"
    if _is_own(folder):
        return folder
    print(f"azureml-elastic: installing {', '.join(requirements)} for this node", file=sys.stderr, flush=True)
    with _scratch(folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        command += ["--quiet", "--target", str(scratch), *requirements]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            output = "\n".join(done.stdout.strip().splitlines()[-_TAIL:])
            _fail(
                f"This node's environment lacks {', '.join(requirements)}, and pip could not install it "
                f"(exit code {done.returncode}). {_NEXT_STEP} Output of pip:\n{output}"
            )
        return _publish(scratch, folder)


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """Create a folder that only this user can read, and remove it unless it was published or is in use."""
    # Where it will be published, since a rename does not cross file systems.
    scratch = Path(tempfile.mkdtemp(prefix="azureml-elastic-", dir=place))
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _publish(scratch: Path, folder: Path, is_usable: Callable[[Path], bool] = lambda _: True) -> Path:
    """Rename a finished folder for the next starts, and return the one to use."""
    try:
        scratch.rename(folder)
    except OSError:  # another start on this node has created it
        if not (_is_own(folder) and is_usable(folder)):
            return scratch
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _is_own(folder: Path) -> bool:
    """Return whether this user owns the folder, from which code will run."""
    return folder.is_dir() and (not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid())


def _fail(message: str) -> NoReturn:
    print(f"azureml-elastic: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
