"""Aborts Horovod's operations once the node's engine knows that another worker is lost.

Horovod's operations fail at once only where they wait for the lost worker itself; others wait for each other until a
timeout, ``HOROVOD_GLOO_TIMEOUT_SECONDS``, which is 30 by default. A thread of this process shuts the connections down.
"""

from __future__ import annotations

import logging
import threading

from azureml_elastic.distributed.process_groups import abort_gloo
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import ElasticError
from azureml_elastic.train.horovod.relay import LOSS, Address, request

__all__ = ["watch_for_losses"]

_LOG = logging.getLogger(__name__)
_started = threading.Lock()


def watch_for_losses(address: Address) -> None:
    """Start the thread, once in this process.

    Args:
        address: host and port of the engine's server.
    """
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, args=(address,), name="loss-watch", daemon=True).start()


def _watch(address: Address) -> None:
    worker, seen = WorkerEnvironment.read().horovod_local_rank, 0
    while True:
        try:
            # To ask again tells the engine that the connections are down.
            seen = request(address, "GET", f"{LOSS}-{worker}-{seen}")
        except ElasticError as error:
            _LOG.debug("The engine has ended: %s", error)
            return
        abort_gloo()
