"""Ray on a run's nodes: the head and the program on the first one, one raylet on each."""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from typing_extensions import override

from azureml_elastic.engines.child import Child
from azureml_elastic.engines.cluster import Cluster, free_port
from azureml_elastic.errors import EngineError

_LOG = logging.getLogger(__name__)

_START_SECONDS = 120.0
_DRAIN_SECONDS = 20.0
_LONGEST_FOLDER_BYTES = 43
"""The path of a socket has at most 107 bytes, of which Ray's names below its folder take up to 64."""

_ADDRESS_FILE = "ray_current_cluster"
"""File in Ray's folder that ``ray start`` writes when all processes of the node have started."""


class Ray(Cluster):
    """This node's part in a Ray cluster. Each node has one raylet; on the first node it is the head's.

    Args:
        cpus: number of CPUs that Ray's tasks and actors on this node may use.
    """

    head_name = "Ray's head"
    head_stop_seconds = 0.0  # the head would drain its raylet first, and what runs there is lost with it in any case

    def __init__(self, host: str, cpus: int, folder: str) -> None:
        super().__init__(host, folder)
        self._cpus = cpus
        self._member: Child | None = None
        self._files: Path | None = None

    @override
    def _credentials(self, key: bytes) -> str:
        if not key:
            raise EngineError(
                "This node has no key of the run (0 bytes), so Ray's connections cannot be authenticated. The node's "
                "log says why it has none."
            )
        return hmac.digest(key, b"ray", "sha256").hex()

    @override
    def start_head(self) -> str:
        folder = self._new_folder()
        ports = ["--port", "0"]
        if find_spec("grpc") is not None:
            # With ray[client] the server for remote clients cannot be switched off, and its usual port may be taken.
            ports += ["--ray-client-server-port", str(free_port(self._host))]
        options = ("--head", *ports, "--include-dashboard", "false", "--no-monitor")
        self._head = self._start(options, folder, self._newest)
        address = self._head.wait_for(lambda: _read(folder / _ADDRESS_FILE), _START_SECONDS)
        if not address:
            self.check()
            raise EngineError(
                f"Ray's head on {self._host} has not started within {_START_SECONDS:.0f} s. Its output is in the "
                f"node's log, and that of its processes in {folder}."
            )
        self._of_cluster[address] = self._newest
        return address

    @override
    def start_member(self, address: str) -> Child | None:
        if self._head is not None:
            return None  # the head is a member itself
        self._member = self._start(("--address", address), self._new_folder(), self.credentials_of(address))
        return self._member

    @override
    def retire_member(self, address: str) -> None:
        assert self._member is not None
        # At SIGTERM Ray schedules nothing more on this node, and waits for what runs here at most for the time that it
        # has as a variable; its processes need some more to end.
        self._member.stop(_DRAIN_SECONDS + 5)
        _LOG.info("This node has left the Ray cluster of %s.", address)

    @override
    def variables(self, address: str) -> Mapping[str, str]:
        return {"RAY_ADDRESS": address, **_authentication(self.credentials_of(address))}

    def _start(self, options: Sequence[str], folder: Path, token: str) -> Child:
        """Start the processes of a node of Ray."""
        if len(os.fsencode(folder)) > _LONGEST_FOLDER_BYTES:
            raise EngineError(
                f"Ray's sockets need a folder whose path has at most {_LONGEST_FOLDER_BYTES} bytes; {folder} has "
                f"{len(os.fsencode(folder))}. Set TMPDIR to a shorter path on the nodes."
            )
        place = ("--node-ip-address", self._host, "--temp-dir", str(folder))
        ports = ("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0")
        common = ("--block", "--num-cpus", str(self._cpus), *place, *ports, "--disable-usage-stats")
        variables = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{_DRAIN_SECONDS:.0f}", **_authentication(token)}
        return Child((sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common), variables)

    def _new_folder(self) -> Path:
        """Return an empty folder in the place of the one before, whose processes have ended."""
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
        self._files = Path(tempfile.mkdtemp(prefix="r", dir=self._folder))
        return self._files


def _authentication(token: str) -> dict[str, str]:
    """Return the environment variables that have Ray's processes, and a program, accept and show only this token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
