"""The round's TCPStore: served by rank 0's agent, outside the workers, so that it survives their restarts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from azureml_elastic.node.rendezvous.state.assignment import Assignment

__all__ = ["open_store"]

_POLL_SECONDS = 0.05

_HESITATION_SECONDS = 2.0
"""After which a node that is not connected looks whether the store's port can be reached at all."""

_REACH_SECONDS = 3.0
"""For that: long enough for the second attempt of TCP."""


def open_store(
    assignment: Assignment,
    timeout: timedelta,
    broken: Callable[[], bool],
    unreachable: Callable[[OSError, float], None] = lambda *_: None,
) -> TCPStore | None:
    """Serve the round's store on rank 0, connect to it elsewhere.

    Connecting to a host that accepts but never answers (a frozen node) blocks ``TCPStore`` for ever, whatever its
    timeout, so that it happens on a thread of its own, which is abandoned when the round breaks. A port that a firewall
    has closed would keep it for as long as the timeout; that is noticed beside it.

    Args:
        assignment: the place in the sealed round.
        timeout: for single operations of the store.
        broken: whether the round has broken in the meantime.
        unreachable: called where the store's port cannot be reached, with what was in the way and the seconds that it
            was given.

    Returns:
        The store, or ``None`` when the round broke first or the port cannot be reached.
    """
    host, port = assignment.store_address
    if assignment.listener is not None:
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=assignment.listener.detach(),
        )
    result: list[TCPStore] = []
    failed = threading.Event()

    def connect() -> None:
        try:
            result.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
        except RuntimeError:  # DistNetworkError and DistStoreError: the hub will tell why
            failed.set()

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    look_at = time.monotonic() + _HESITATION_SECONDS
    look: _Look | None = None
    while thread.is_alive() and not broken() and (look is None or look.error is None):
        thread.join(_POLL_SECONDS)
        if look is None and time.monotonic() >= look_at:
            look = _Look(host, port)
    if result:
        return result[0]
    if look is not None and look.error is not None and not broken():
        unreachable(look.error, _REACH_SECONDS)
    return None


class _Look:
    """One attempt, on a thread, to connect to a port.

    Attributes:
        error: what was in the way, ``None`` for nothing, or not yet.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self.error: OSError | None = None
        threading.Thread(target=self._connect, name="store look", daemon=True).start()

    def _connect(self) -> None:
        try:
            socket.create_connection(self._address, _REACH_SECONDS).close()
        except OSError as error:
            self.error = error
