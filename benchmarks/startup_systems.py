"""How a node of each system is started for ``startup.py``, each with the settings that start it fastest."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

from process_trees import Trees
from systems import TORCHRUN_SETTINGS

from azureml_elastic.environment import names as environment
from azureml_elastic.local.azurite import Azurite

__all__ = ["C10D", "NVRX", "OURS", "OURS_SQLITE", "TORCHFT", "NodeCommand", "System", "checkout", "node_command"]

OURS = "azureml-elastic"
OURS_SQLITE = "azureml-elastic, SQLite"
C10D = "torchrun, c10d"
TORCHFT = "torchft"
NVRX = "NVRx, in process"

_HERE = Path(__file__).parent
_SCRIPTS = _HERE / "starting"

Kind = Literal["azurite", "sqlite", "torchrun", "torchft", "nvrx"]
_IMPORTED: Mapping[Kind, str] = {"torchft": "torchft", "nvrx": "nvidia_resiliency_ext.inprocess"}
_SCRIPT_OF: Mapping[Kind, str] = {
    "azurite": "session.py",
    "sqlite": "session.py",
    "torchrun": "plain.py",
    "torchft": "replica.py",
    "nvrx": "in_process.py",
}


@dataclass(frozen=True)
class System:
    """A measured system.

    Args:
        name: name in the tables.
        kind: how its nodes are started.
        python: interpreter of its nodes.
        path: folder whose packages take precedence, ``None`` for those of the interpreter.
        recovery: recovery mode, of this library.
        variables: environment variables of all its processes.
    """

    name: str
    kind: Kind
    python: str = sys.executable
    path: Path | None = None
    recovery: str = "restart"
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it is this library, of any version."""
        return self.kind in ("azurite", "sqlite")

    @property
    def grows(self) -> bool:
        """Whether a node can join a running job."""
        return self.kind != "nvrx"

    @property
    def script(self) -> str:
        """Path of the training script."""
        return str(_SCRIPTS / _SCRIPT_OF[self.kind])

    def environment(self) -> dict[str, str]:
        """Return the environment of all its processes."""
        # Byte code is kept as usual, and no name server is asked: torch looks up even 127.0.0.1.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RES_OPTIONS": "attempts:0"}
        if self.path is not None:
            own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH")]))
        return {**inherited, **own, "BENCH_OBSERVER": str(os.getpid()), **self.variables}

    def problem(self) -> str | None:
        """Import the system once, so that its byte code and files are cached; return why it cannot be measured."""
        module = "azureml_elastic.train" if self.ours else _IMPORTED.get(self.kind, "torch")
        done = subprocess.run(
            [self.python, "-W", "ignore", "-c", f"import torch.nn.parallel.distributed, {module}"],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@dataclass(frozen=True)
class NodeCommand:
    """Command and environment that start a node.

    Args:
        argv: function that returns the command line of a node by its number.
        variables: function that returns the additional environment variables of a node by its number.
    """

    argv: Callable[[int], Sequence[str]]
    variables: Callable[[int], Mapping[str, str]] = field(default=lambda _: {})


@contextlib.contextmanager
def node_command(
    system: System, trees: Trees, folder: Path, nodes: tuple[int, int], azurite: Azurite
) -> Iterator[NodeCommand]:
    """Start what the nodes share, such as a store, and yield how to start a node.

    Args:
        system: the system.
        trees: where shared processes are started.
        folder: empty folder.
        nodes: minimum and maximum number of nodes.
        azurite: emulator of the table.
    """
    if system.ours:
        yield _ours(system, folder, nodes, azurite)
    elif system.kind == "torchrun":
        with _torchrun(system, nodes) as command:
            yield command
    elif system.kind == "torchft":
        yield _torchft(system, trees, nodes)
    else:
        yield _nvrx(system, nodes[0])


def _ours(system: System, folder: Path, nodes: tuple[int, int], azurite: Azurite) -> NodeCommand:
    endpoint = azurite.endpoint if system.kind == "azurite" else f"sqlite:///{folder / 'table.sqlite'}"
    given = {
        "nodes": nodes,
        "endpoint": endpoint,
        "checkpoints": str(folder / "checkpoints"),
        "run_id": f"bench-{secrets.token_hex(4)}",
        "recovery": system.recovery,
    }
    words = [system.python, str(_SCRIPTS / "plan.py"), json.dumps(given)]
    plan = subprocess.run(words, env=system.environment(), capture_output=True, text=True, check=True).stdout.strip()
    shared = {
        environment.PLAN: plan,
        environment.RUN_DIR: str(folder / "run"),
        environment.LOCAL_ADDRESS: "127.0.0.1",
    }
    argv = (system.python, "-m", "azureml_elastic.node", "--", system.python, system.script)
    return NodeCommand(lambda _: argv, lambda number: {**shared, environment.NODE_ID: f"node-{number}"})


@contextlib.contextmanager
def _torchrun(system: System, nodes: tuple[int, int]) -> Iterator[NodeCommand]:
    from torch.distributed import TCPStore

    # In this process and ready before the first node: in a cluster, a machine of its own.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    settings = ",".join(f"{name}={value}" for name, value in {"is_host": "false", **TORCHRUN_SETTINGS}.items())
    argv = (
        *(system.python, str(_HERE / "peers.py")),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{store.port}"),
        *("--rdzv-id", f"bench-{secrets.token_hex(4)}"),
        *("--rdzv-conf", settings),
        *("--nnodes", f"{nodes[0]}:{nodes[1]}"),
        *("--nproc-per-node", "1"),
        *("--max-restarts", "100"),
        *("--monitor-interval", "0.1"),
        *("--local-addr", "127.0.0.1"),
        system.script,
    )
    # With the shared store, torch never admits a new node to a running job.
    yield NodeCommand(lambda _: argv, lambda _: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    del store


def _torchft(system: System, trees: Trees, nodes: tuple[int, int]) -> NodeCommand:
    port = _free_port()
    words = [
        *(system.python, str(_SCRIPTS / "lighthouse.py")),
        *("--bind", f"127.0.0.1:{port}"),
        *("--min_replicas", str(nodes[0])),
        *("--quorum_tick_ms", "20"),
        *("--join_timeout_ms", "1000"),
    ]
    trees.start("lighthouse", words, system.environment())
    _wait_for_port(port)
    shared = {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "BENCH_MINIMUM": str(nodes[0]),
        "BENCH_MAXIMUM": str(nodes[1]),
    }

    def argv(_: int) -> Sequence[str]:
        return (
            *(system.python, str(_HERE / "peers.py")),
            *("--nnodes", "1"),
            *("--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1"),
            *("--master-port", str(_free_port())),
            *("--monitor-interval", "0.1"),
            system.script,
        )

    return NodeCommand(argv, lambda number: {**shared, "BENCH_REPLICA": str(number)})


def _nvrx(system: System, world: int) -> NodeCommand:
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "BENCH_WRAPPER_PORT": str(_free_port()),
    }
    argv = (system.python, "-W", "ignore", system.script)
    return NodeCommand(lambda _: argv, lambda number: {**shared, "RANK": str(number), "LOCAL_RANK": "0"})


@contextlib.contextmanager
def checkout(where: str) -> Iterator[tuple[Path | None, str]]:
    """Yield where the package of another version is, and its interpreter.

    Args:
        where: a folder with that checkout, an interpreter of an environment with that version, or a commit.
    """
    path = Path(where)
    if path.is_dir():
        yield (path.resolve() / "src"), sys.executable
    elif path.is_file():
        yield None, str(path.absolute())
    else:
        import tempfile

        words = ["git", "-C", str(_HERE.parent), "archive", where, "src"]
        archive = subprocess.run(words, capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory(prefix="bench-before-") as folder:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            yield Path(folder, "src"), sys.executable


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, limit_s: float = 30.0) -> None:
    import time

    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return
