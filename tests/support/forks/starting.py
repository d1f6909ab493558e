"""The two ways to start the same worker."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from azureml_elastic.forks.client import PreloadServer
from azureml_elastic.program.command import Program

END_SECONDS = 300.0
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def on_path(folder: Path) -> dict[str, str]:
    """Return an environment in which a folder comes first on the path."""
    return {**ENVIRON, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [ENVIRON.get("PYTHONPATH")])])}


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str


def preload_server(target, *arguments, kind="script", options=("-u",), environ: Mapping[str, str] | None = None):
    """Start a preload server with the environment of its workers."""
    environ = ENVIRON if environ is None else environ
    server = PreloadServer(Program(None, options, kind, str(target), arguments), environ)
    server.begin(environ)
    return server


def run_forked(server: PreloadServer, environ: Mapping[str, str], folder: Path, name: str) -> Result:
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    code = server.start(environ, out, err).wait(END_SECONDS)
    return Result(code, out.read_text(), err.read_text())


def run_plain(command, environ: Mapping[str, str], folder: Path, name: str) -> Result:
    """Start a worker as torchrun does."""
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, env=environ, stdout=stdout, stderr=stderr, start_new_session=True)
        code = process.wait(END_SECONDS)
    return Result(code, out.read_text(), err.read_text())


def wait_for_text(path: Path, text: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < until, f"{path} does not contain {text!r}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Return whether a process has ended, even if it is not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
