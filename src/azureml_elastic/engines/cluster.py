"""The cluster of a framework, and one program that uses it.

The first node of a round (rank 0) has the *head*, every node has a *member* that is connected to it, and the program
runs on the first node, with the head's address in its environment. A round that begins with the same first node keeps
the head, the program and all members: nodes come and go without a restart. With another first node, the cluster and
the program are started again.
"""

from __future__ import annotations

import errno
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from azureml_elastic.engines.child import Child
from azureml_elastic.engines.engine import RoundStore
from azureml_elastic.errors import EngineError
from azureml_elastic.ipc.agent_interface import WorkerIdentity

_LOG = logging.getLogger(__name__)

_ADDRESS = "address"
"""Name of the head's address in the round's store."""


class Cluster(ABC):
    """The cluster of a framework, as one node takes part in it. Not thread-safe.

    Args:
        host: address of this node, which the others reach.
        folder: folder for the files of the cluster, which only this process's user can enter.
    """

    head_name: str
    """What messages call the head."""
    head_stop_seconds = 2.0

    def __init__(self, host: str, folder: str) -> None:
        self._host = host
        self._folder = folder
        self._head: Child | None = None
        self._newest = ""  # what a key gives for the connections of the next cluster
        self._of_cluster: dict[str, str] = {}  # the same for each cluster so far, by the address of its head

    def use_key(self, key: bytes) -> None:
        """Have all connections authenticated with a key that only the run's nodes have. Called before all others.

        A cluster keeps the key that it has begun with: its processes stay when the run gets another one.

        Raises:
            EngineError: there is no key.
        """
        self._newest = self._credentials(key)

    def credentials_of(self, address: str) -> str:
        """Return what :meth:`_credentials` has returned when this node learned of the cluster with this head."""
        return self._of_cluster.setdefault(address, self._newest)

    @abstractmethod
    def _credentials(self, key: bytes) -> str:
        """Return what authenticates connections by a key: a token, or a file."""

    @abstractmethod
    def start_head(self) -> str:
        """Start the head on this node, and return its address once it accepts connections.

        Raises:
            EngineError: it has not started.
        """

    @abstractmethod
    def start_member(self, address: str) -> Child | None:
        """Start this node's member of the cluster with this head; the one before is gone.

        Returns:
            The member, ``None`` where this node has the head and needs no other process.
        """

    @abstractmethod
    def retire_member(self, address: str) -> None:
        """Have the cluster move what this node's member holds to others. Blocks until it is done, or cannot be done."""

    @abstractmethod
    def variables(self, address: str) -> Mapping[str, str]:
        """Return the environment variables by which the program finds the cluster."""

    def check(self) -> None:
        """Raise if the head of this node has ended.

        Raises:
            EngineError: it has ended.
        """
        if self._head is not None and (code := self._head.exit_code) is not None:
            raise EngineError(
                f"{self.head_name} on {self._host} has ended with {code}; its output is in the node's log."
            )

    def stop_head(self) -> None:
        """End the head, if this node has it."""
        head, self._head = self._head, None
        if head is not None:
            head.stop(self.head_stop_seconds)


class ClusterEngine:
    """Keeps this node in the cluster and, on the first node, the head and the program; an engine."""

    def __init__(self, cluster: Cluster, program: Sequence[str]) -> None:
        self._cluster = cluster
        self._command = tuple(program)
        self._store: RoundStore | None = None
        self._leads = False
        self._address: str | None = None
        """Address of the head that this node's member is connected to, or that is on this node."""
        self._member: Child | None = None
        self._program: Child | None = None

    def enter(self, place: WorkerIdentity, store: RoundStore) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        self._store = store
        self._cluster.use_key(store.key)
        if place.rank == 0:
            self._lead(store)
        elif self._leads:
            self.stop()  # this node was thought to be lost, and another one has the head and the program

    def poll(self) -> int | None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        assert self._store is not None
        if self._program is not None:
            self._cluster.check()
            if (code := self._program.exit_code) is not None:
                return code
        address = self._store.get(_ADDRESS)
        if address is not None:
            self._follow(address.decode())
        return None

    def round_over(self) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""

    def leave(self) -> bool:
        """Move what this node holds to others. Where it has the head, all is lost with it."""
        if self._member is not None and self._address is not None and not self._leads:
            self._cluster.retire_member(self._address)
        return True

    def stop(self) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        if self._program is not None:
            self._program.stop()
            self._program = None
        self._stop_member()
        self._cluster.stop_head()
        self._leads, self._address = False, None

    def _lead(self, store: RoundStore) -> None:
        """Have the head and the program on this node: those of the round before, if they are here."""
        if not self._leads:
            self.stop()
            self._address = self._cluster.start_head()
            self._leads = True
        assert self._address is not None
        # Also where nothing has changed: each round has a store of its own, in which other nodes look for the address.
        store.set(_ADDRESS, self._address.encode())
        self._follow(self._address)
        if self._program is None:
            self._program = Child(self._command, self._cluster.variables(self._address))

    def _follow(self, address: str) -> None:
        """Have a member that is connected to this head."""
        if self._member is not None and self._address == address:
            if (code := self._member.exit_code) is None:
                return
            _LOG.warning("The node's member of the cluster has ended with %d; starting another one.", code)
        self._stop_member()
        self._address = address
        self._member = self._cluster.start_member(address)

    def _stop_member(self) -> None:
        if self._member is not None:
            self._member.stop(timeout=0)  # at once: what it holds was moved by leave(), or its cluster is gone
            self._member = None


def free_port(host: str, port_range: tuple[int, int] | None = None) -> int:
    """Return a free port, the last one of a range: agents and workers take theirs from its beginning.

    Raises:
        EngineError: all of the range are taken.
    """
    low, high = port_range or (0, 0)
    for port in range(high, low - 1, -1):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Dask does
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return int(probe.getsockname()[1])
    raise EngineError(
        f"All {high - low + 1} ports of port_range={low}-{high} are taken on {host}, and the cluster needs one. "
        "Free some, or give a larger port_range."
    )
