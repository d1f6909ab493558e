"""Dask: a scheduler on the first node, and workers on all nodes.

A scheduler that is lost takes its state with it: the round's new first node has another one, and the program computes
its futures again. A worker that leaves with notice is retired, so that its results are on other workers before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping

from azureml_elastic.engines.children import Child
from azureml_elastic.errors import EngineError

__all__ = ["Dask"]

_LOG = logging.getLogger(__name__)

_START_SECONDS = 60.0
_POLL_SECONDS = 0.02
_RETIRE_SECONDS = 20.0


class Dask:
    """This node's part in a Dask cluster.

    Args:
        host: address of this node, which the others reach.
        workers: number of worker processes.
        threads: number of threads of each worker.
        folder: folder for the workers' files.
    """

    def __init__(self, host: str, workers: int, threads: int, folder: str) -> None:
        self._host = host
        self._workers = workers
        self._threads = threads
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._folder = folder
        self._head: Child | None = None

    def use_key(self, key: bytes) -> None:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""

    def start_head(self) -> str:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""
        port = _free_port(self._host)
        options = ("--host", self._host, "--port", str(port), "--no-dashboard")
        self._head = Child((sys.executable, "-m", "distributed.cli.dask_scheduler", *options))
        until = time.monotonic() + _START_SECONDS
        while not _accepts(self._host, port):
            self.check()
            if time.monotonic() >= until:
                raise EngineError(
                    f"Dask's scheduler on {self._host}, port {port}, accepts no connections after "
                    f"{_START_SECONDS:.0f} s. Its output is in the node's log."
                )
            time.sleep(_POLL_SECONDS)
        return f"tcp://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    def start_member(self, address: str) -> Child:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""
        counts = ("--nworkers", str(self._workers), "--nthreads", str(self._threads))
        options = ("--name", self._name, "--host", self._host, "--no-dashboard", "--local-directory", self._folder)
        return Child((sys.executable, "-m", "distributed.cli.dask_worker", address, *counts, *options))

    def retire_member(self, address: str) -> None:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""
        try:
            moved = asyncio.run(asyncio.wait_for(self._retire(address), _RETIRE_SECONDS))
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            _LOG.warning("The results on this node's Dask workers could not be moved to others: %r", error)
        else:
            _LOG.info("Retired %d Dask workers; their results are on other workers.", moved)

    def variables(self, address: str) -> Mapping[str, str]:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""
        return {"DASK_SCHEDULER_ADDRESS": address}

    def check(self) -> None:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""
        if self._head is not None and (code := self._head.exit_code) is not None:
            raise EngineError(
                f"Dask's scheduler on {self._host} has ended with {code}; its output is in the node's log."
            )

    def stop_head(self) -> None:
        """See :class:`~azureml_elastic.engines.cluster.Cluster`."""
        head, self._head = self._head, None
        if head is not None:
            head.stop()

    async def _retire(self, address: str) -> int:
        """Retire this node's workers, and return their number."""
        from distributed import Client

        async with Client(address, asynchronous=True, set_as_default=False) as client:
            workers = (await client.scheduler.identity(n_workers=-1))["workers"]
            own = [worker for worker, about in workers.items() if self._is_own(str(about["name"]))]
            if own:
                await client.retire_workers(own, close_workers=True, remove=True)
            return len(own)

    def _is_own(self, name: str) -> bool:
        # Dask numbers the workers of a node that has several.
        return name == self._name or name.rpartition("-")[0] == self._name


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
