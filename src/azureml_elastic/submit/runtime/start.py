"""Start script of a node: makes this library importable, installs missing requirements, and runs the agent.

This file is shipped beside the library and uses the standard library only. Missing requirements are installed into a
temporary folder of the node, never into the environment; torch must be part of the environment.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

__all__ = ["is_satisfied", "main", "unmet"]

_NEXT_STEP = (
    "Use an environment that has it, as from pip install 'azureml-elastic[node]', in which case "
    "delivery='environment' may be set too."
)
_TAIL = 15


def main(argv: Sequence[str]) -> int:
    """Prepare this process and its children, then run the node's entry point.

    Args:
        argv: arguments of the entry point: its options, ``--``, and the program.
    """
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    _put_on_path(here / "site")
    needed = json.loads((here / "requirements.json").read_text(encoding="utf-8"))
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
    """Prepend a folder to the import path of this process and of its children."""
    sys.path.insert(0, str(folder))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([inherited] if inherited else [])])
    importlib.invalidate_caches()


def _install(requirements: Sequence[str]) -> Path:
    """Install requirements into a folder of this node, unless an earlier start has, and return the folder."""
    name = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"azureml-elastic-{name}"
    if _is_own(folder):
        return folder
    print(f"azureml-elastic: installing {', '.join(requirements)} for this node", file=sys.stderr, flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="azureml-elastic-"))
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["--quiet", "--target", str(scratch), *requirements]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        shutil.rmtree(scratch, ignore_errors=True)
        output = "\n".join(done.stdout.strip().splitlines()[-_TAIL:])
        _fail(
            f"This node's environment lacks {', '.join(requirements)}, and pip could not install it "
            f"(exit code {done.returncode}). {_NEXT_STEP} Output of pip:\n{output}"
        )
    try:
        scratch.rename(folder)
    except OSError:  # another start on this node has created it
        return folder if _is_own(folder) else scratch
    return folder


def _is_own(folder: Path) -> bool:
    """Return whether this user owns the folder, from which code will run."""
    return folder.is_dir() and (not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid())


def _fail(message: str) -> NoReturn:
    print(f"azureml-elastic: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
