r"""The rendezvous behind torch's ``RendezvousHandler``, registered as ``azure-table`` for plain torchrun.

::

    torchrun --rdzv-backend=azure-table --rdzv-endpoint=<account url or SQLite path> --rdzv-id=<run> \
        --nnodes=1:3 train.py

torchrun's own agent uses rank 0's store after the rendezvous and fails if that node dies at that moment, which
``python -m azureml_elastic.node`` does not. See ``docs/how-to/engines.md``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import RunFailed, RunSucceeded, UsageError
from azureml_elastic.forks.store_server import STORE_TIMEOUT, listening_store
from azureml_elastic.node.core.actions import Close
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.host.addresses import advertised_address
from azureml_elastic.node.rendezvous.context import LocalNode
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.table import open_table

_LOG = logging.getLogger(__name__)

BACKEND = "azure-table"

_POLL_SECONDS = 0.05


def open_store(assignment: Assignment, timeout: timedelta, broken: Callable[[], bool]) -> TCPStore | None:
    """Serve the round's store on rank 0, connect to it elsewhere.

    ``TCPStore`` blocks forever, whatever its timeout, on a host that accepts connections but never answers, such as a
    stopped process. So it connects on a thread, which is abandoned when the round breaks.

    Args:
        timeout: timeout of single operations of the store.
        broken: function that returns whether the round has broken.

    Returns:
        The store, or ``None`` if the round has broken.
    """
    host, port = assignment.store_address
    if assignment.listener is not None:
        # The store closes it; the object would close another file of that number later.
        return listening_store(host, port, assignment.listener.detach(), timeout)
    stores: list[TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):  # DistNetworkError and DistStoreError: the hub will report why
            stores.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    while thread.is_alive() and not broken():
        thread.join(_POLL_SECONDS)
    return stores[0] if stores else None


class TableRendezvousHandler(RendezvousHandler):
    """A :class:`Rendezvous` behind torch's interface."""

    def __init__(self, rendezvous: Rendezvous, run_id: str) -> None:
        self._rendezvous = rendezvous
        self._run_id = run_id
        self._joined = False
        self._closed = False

    def get_backend(self) -> str:
        """Return ``azure-table``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers share the round's store, whose address every node reads from the table."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node is part of a round.

        Raises:
            SystemExit: the run has succeeded; torchrun exits with 0. torch has ``RendezvousGracefulExitError`` for
                this, but its launcher then calls ``None.is_failed()`` and exits with 1.
            RendezvousClosedError: the run has failed, with this message.
            RendezvousConnectionError: the table cannot be used.
        """
        rendezvous, store = self._rendezvous, None
        try:
            while store is None:
                assignment = rendezvous.join()
                store = open_store(assignment, STORE_TIMEOUT, lambda: rendezvous.status().broken)
        except RunSucceeded as end:
            self._closed = True
            _LOG.info("%s Nothing is left to do for this node.", end)
            raise SystemExit(0) from end
        except RunFailed as end:
            self._closed = True
            raise RendezvousClosedError(str(end)) from end
        except UsageError as error:
            raise RendezvousConnectionError(str(error)) from error
        self._joined = True
        host, port = assignment.store_address
        return RendezvousInfo(store, assignment.rank, len(assignment.round.members), RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        """Return whether the end of the run is known to this node."""
        return self._closed

    def set_closed(self) -> None:
        """End the run as failed, since torchrun gives up."""
        if self._joined and not self._closed:
            self._rendezvous.round_end.write(
                Close(succeeded=False, message="torchrun closed the rendezvous.", exit_code=1)
            )
            self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return the number of spares, or 1 when the round is over and all nodes must join the next."""
        status = self._rendezvous.status()
        return 1 if status.broken else len(status.waiting)

    def get_run_id(self) -> str:
        """Return the identifier of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """End the run for all nodes and close all connections.

        torchrun calls this in a ``finally`` clause without its agent's result; an exception in flight is the failure.
        """
        error = sys.exc_info()[1]
        if self._joined and not self._closed:
            message = "" if error is None else f"A worker failed under torchrun: {error}"
            exit_code = 0 if error is None else 1
            self._rendezvous.round_end.write(Close(succeeded=error is None, message=message, exit_code=exit_code))
            self._closed = True
        self._rendezvous.shutdown()
        return True


def create_handler(parameters: RendezvousParameters) -> TableRendezvousHandler:
    """Make the handler from torchrun's options.

    Args:
        parameters: torchrun's options. ``endpoint`` is the account's table URL or the path of an SQLite file.
            ``--rdzv-conf`` may set fields of ``RendezvousTimings`` in seconds, and ``port_range=29400-29500`` and
            ``advertise=eth0`` of ``TableRendezvous``.

    Raises:
        UsageError: the range of ports is malformed, this machine has no such address, or the table cannot be used.
    """
    timings = RendezvousTimings.model_validate(
        {name: float(value) for name, value in parameters.config.items() if name in RendezvousTimings.model_fields}
    )
    where = TableRendezvous(
        endpoint=parameters.endpoint or None,
        timings=timings,
        port_range=_ports(parameters.config.get("port_range")),
        advertise=parameters.config.get("advertise"),
    )
    environment = NodeEnvironment.read()
    rendezvous = Rendezvous(
        table=open_table(where, parameters.run_id, environment),
        node=LocalNode(
            f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
            parameters.local_addr or advertised_address(where, environment).host,
            ports=where.port_range,
        ),
        limits=Limits(parameters.min_nodes, parameters.max_nodes),
        timings=timings,
    )
    rendezvous.announce()
    return TableRendezvousHandler(rendezvous, parameters.run_id)


def _ports(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = str(text).partition("-")
    if not (low.isdigit() and high.isdigit()):
        raise UsageError(f"port_range={text} in --rdzv-conf is not a range of ports; give for example 29400-29500.")
    return int(low), int(high)
