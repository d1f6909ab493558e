"""The round's TCPStore in torchrun's agent: served on rank 0, and a client of it elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from azureml_elastic.node.rendezvous.state.assignment import Assignment

__all__ = ["open_store"]

_POLL_SECONDS = 0.05

_PROBE_AFTER_SECONDS = 2.0
"""Time after which a node that is not connected probes the store's port."""

_PROBE_SECONDS = 3.0
"""Timeout of the probe: long enough for TCP's second attempt."""


def open_store(
    assignment: Assignment,
    timeout: timedelta,
    broken: Callable[[], bool],
    unreachable: Callable[[OSError, float], None] = lambda *_: None,
) -> TCPStore | None:
    """Serve the round's store on rank 0, connect to it elsewhere.

    ``TCPStore`` blocks forever, whatever its timeout, on a host that accepts connections but never answers, such as a
    stopped process. So it connects on a thread, which is abandoned when the round breaks. A port that a firewall blocks
    would use up the whole timeout; a probe on another thread finds that earlier.

    Args:
        assignment: place in the sealed round.
        timeout: timeout of single operations of the store.
        broken: function that returns whether the round has broken.
        unreachable: callback with the error and the timeout in seconds of the probe, where the port cannot be reached.

    Returns:
        The store, or ``None`` if the round has broken or the port cannot be reached.
    """
    host, port = assignment.store_address
    if assignment.listener is not None:
        descriptor = assignment.listener.detach()
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
        )
    stores: list[TCPStore] = []
    errors: list[OSError] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):  # DistNetworkError and DistStoreError: the hub will report why
            stores.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))

    def probe() -> None:
        try:
            socket.create_connection((host, port), _PROBE_SECONDS).close()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    probe_at = time.monotonic() + _PROBE_AFTER_SECONDS
    probing = False
    while thread.is_alive() and not broken() and not errors:
        thread.join(_POLL_SECONDS)
        if not probing and time.monotonic() >= probe_at:
            probing = True
            threading.Thread(target=probe, name="store probe", daemon=True).start()
    if stores:
        return stores[0]
    if errors and not broken():
        unreachable(errors[0], _PROBE_SECONDS)
    return None
