"""Notifications that the hosts have changed, after which workers leave their place at the next commit.

Workers listen for them with Horovod's own service, and send its address and a key to the rendezvous server as a pickled
object. It is loaded only if it came from a process of the worker: all users of the machine reach the port.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import psutil

from azureml_elastic.engines.children import Child

__all__ = ["Notifications"]

_LOG = logging.getLogger(__name__)


class Notifications:
    """Notifies the workers of one node. Thread-safe."""

    def __init__(self) -> None:
        self._clients: dict[int, tuple[int, bytes]] = {}

    def listens(self, local_rank: int, worker: Child, value: bytes, port: int) -> None:
        """Remember where a worker listens.

        Args:
            local_rank: local rank of the worker.
            worker: its process.
            value: its addresses and key, as Horovod encodes them.
            port: port of the connection by which this came.
        """
        if _is_from(worker, port):
            self._clients[local_rank] = (worker.pid, value)
        else:
            _LOG.warning("Refused the address of worker %d from a process that is none of the worker's.", local_rank)

    def notify(self, local_rank: int, worker: Child) -> None:
        """Notify a worker, if it listens. Returns at once: a stopped process would not answer."""
        pid, value = self._clients.get(local_rank, (0, b""))
        if pid == worker.pid:
            threading.Thread(target=_notify, args=(value,), name="notification", daemon=True).start()


def _notify(value: bytes) -> None:
    from horovod.runner.common.util import codec
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient

    addresses, key = codec.loads_base64(value)
    port = next(port for found in addresses.values() for _, port in found)
    with contextlib.suppress(Exception):  # of Horovod's client, which raises anything where the worker has ended
        client = WorkerNotificationClient({"lo": [("127.0.0.1", port)]}, key, 0)
        # Workers compare the time with that of the notification before. "mixed" has them synchronize their state.
        client.notify_hosts_updated(time.time_ns(), HostUpdateResult.mixed)


def _is_from(worker: Child, port: int) -> bool:
    """Return whether a connection's client is a process of the worker."""
    for process in worker.tree():
        with contextlib.suppress(psutil.Error):
            if any(each.laddr and each.laddr.port == port for each in process.net_connections("tcp")):
                return True
    return False
