"""The round's TCPStore: served by rank 0's agent, outside the workers, so that it survives their restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from azureml_elastic.node.rendezvous.seat import Seat

__all__ = ["open_store"]

_POLL_SECONDS = 0.05


def open_store(seat: Seat, timeout: timedelta, broken: Callable[[], bool]) -> TCPStore | None:
    """Serve the round's store on rank 0, connect to it elsewhere.

    Connecting to a host that accepts but never answers (a frozen node) blocks ``TCPStore`` for ever, whatever its
    timeout, so that it happens on a thread of its own, which is abandoned when the round breaks.

    Args:
        seat: the place in the sealed round.
        timeout: for single operations of the store.
        broken: whether the round has broken in the meantime.

    Returns:
        The store, or ``None`` when the round broke first.
    """
    host, port = seat.store_address
    if seat.listener is not None:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=seat.listener.detach()
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
    while thread.is_alive() and not broken():
        thread.join(_POLL_SECONDS)
    if result:
        return result[0]
    return None
