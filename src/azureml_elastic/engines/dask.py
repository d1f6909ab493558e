"""Dask: a scheduler on the first node, and workers on all nodes.

A scheduler that is lost takes its state with it: the round's new first node has another one, and the program computes
its futures again. A worker that leaves with notice is retired, so that its results are on other workers before it ends.

All connections are mutual TLS with credentials that are derived from the run's key: Dask executes what it receives, and
without TLS it authenticates nobody.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from azureml_elastic.engines.child import Child
from azureml_elastic.engines.cluster import Cluster, free_port
from azureml_elastic.errors import EngineError
from azureml_elastic.ipc import tls

_LOG = logging.getLogger(__name__)

_START_SECONDS = 60.0
_RETIRE_SECONDS = 20.0
_PURPOSE = "dask"
_HTTP_ADDRESS = "127.0.0.1:0"
"""Where Dask's HTTP servers listen: they authenticate nobody, and cannot be switched off."""


def derive_credentials(key: bytes, purpose: str) -> bytes:
    """Return the credentials of the run's engine; see :func:`azureml_elastic.ipc.tls.derive_credentials`.

    Raises:
        EngineError: there is no key.
    """
    if not key:
        raise EngineError(
            f"This node has no key of the run (0 bytes), so the connections of {purpose} cannot be secured. The node's "
            "agent passes it on from the run's table: start the job with the same version of azureml-elastic on all "
            "nodes, and not with an agent of your own."
        )
    return tls.derive_credentials(key, purpose)


def write_credentials(pem: bytes, folder: str, purpose: str) -> Path:
    """Write credentials to a file that only this process's user can read, and return its path.

    Other credentials get another path, so that a process that was started with these keeps them.
    """
    path = Path(folder, f"{purpose}-{hashlib.sha256(pem).hexdigest()[:16]}.pem")
    descriptor, unfinished = tempfile.mkstemp(dir=folder)  # of mode 0600
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(pem)
    os.replace(unfinished, path)  # noqa: PTH105 - a process that starts reads all of it, or nothing
    return path


def tls_context(path: Path | str) -> ssl.SSLContext:
    """Return the context of a client that has these credentials and accepts no others."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is that of all nodes
    context.load_verify_locations(path)
    context.load_cert_chain(path)
    return context


class Dask(Cluster):
    """This node's part in a Dask cluster.

    Args:
        threads: number of threads of each worker.
        port_range: first and last port to listen on; ``None`` for any free ports.
    """

    head_name = "Dask's scheduler"

    def __init__(
        self, host: str, workers: int, threads: int, folder: str, port_range: tuple[int, int] | None = None
    ) -> None:
        super().__init__(host, folder)
        self._workers = workers
        self._threads = threads
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._port_range = port_range

    @override
    def _credentials(self, key: bytes) -> str:
        return str(write_credentials(derive_credentials(key, _PURPOSE), self._folder, _PURPOSE))

    @override
    def start_head(self) -> str:
        port = free_port(self._host, self._port_range)
        address = f"tls://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
        self._of_cluster[address] = self._newest  # a cluster of an earlier round may have had the same port
        options = ("--host", self._host, "--port", str(port), "--no-dashboard", "--dashboard-address", _HTTP_ADDRESS)
        command = (sys.executable, "-m", "distributed.cli.dask_scheduler", *options)
        self._head = Child(command, _tls_variables(self._newest))
        context = tls_context(self._newest)
        if not self._head.wait_for(lambda: _accepts(self._host, port, context), _START_SECONDS):
            self.check()
            raise EngineError(
                f"Dask's scheduler on {self._host}, port {port}, accepts no connections after {_START_SECONDS:.0f} s. "
                "Its output is in the node's log."
            )
        return address

    @override
    def start_member(self, address: str) -> Child:
        counts = ("--nworkers", str(self._workers), "--nthreads", str(self._threads))
        http = ("--no-dashboard", "--dashboard-address", _HTTP_ADDRESS)
        ports: tuple[str, ...] = ()
        if self._port_range is not None:  # workers and nannies share it, and pass over ports that are taken
            shared = "{}:{}".format(*self._port_range)
            ports = ("--worker-port", shared, "--nanny-port", shared)
        options = ("--name", self._name, "--host", self._host, "--local-directory", self._folder, *http, *ports)
        command = (sys.executable, "-m", "distributed.cli.dask_worker", address, *counts, *options)
        return Child(command, _tls_variables(self.credentials_of(address)))

    @override
    def retire_member(self, address: str) -> None:
        try:
            moved = asyncio.run(asyncio.wait_for(self._retire(address), _RETIRE_SECONDS))
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            _LOG.warning("The results on this node's Dask workers could not be moved to others: %r", error)
        else:
            _LOG.info("Retired %d Dask workers; their results are on other workers.", moved)

    @override
    def variables(self, address: str) -> Mapping[str, str]:
        return {"DASK_SCHEDULER_ADDRESS": address, **_tls_variables(self.credentials_of(address))}

    async def _retire(self, address: str) -> int:
        """Retire this node's workers, and return their number."""
        from distributed import Client, Security

        file = self.credentials_of(address)
        security = Security(require_encryption=True, tls_ca_file=file, tls_client_cert=file, tls_client_key=file)
        async with Client(address, security=security, asynchronous=True, set_as_default=False) as client:
            workers = (await client.scheduler.identity(n_workers=-1))["workers"]
            own = [worker for worker, about in workers.items() if self._is_own(str(about["name"]))]
            if own:
                await client.retire_workers(own, close_workers=True, remove=True)
            return len(own)

    def _is_own(self, name: str) -> bool:
        # Dask numbers the workers of a node that has several.
        return name == self._name or name.rpartition("-")[0] == self._name


def _tls_variables(credentials: str) -> dict[str, str]:
    """Return the environment variables that have a process of Dask, or a client, use credentials, and no others."""
    tls = "DASK_DISTRIBUTED__COMM__TLS__"
    files = {f"{tls}{role}__{kind}" for role in ("SCHEDULER", "WORKER", "CLIENT") for kind in ("CERT", "KEY")}
    return {
        "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
        f"{tls}MIN_VERSION": "1.3",
        **dict.fromkeys({f"{tls}CA_FILE", *files}, credentials),
    }


def _accepts(host: str, port: int, context: ssl.SSLContext) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1) as sock, context.wrap_socket(sock):
            return True
    except OSError:
        return False
