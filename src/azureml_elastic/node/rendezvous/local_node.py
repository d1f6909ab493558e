"""This node as its rendezvous presents it to the others, and what the rendezvous asks of the rest of the node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.ipc import Connection
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.node.host import new_incarnation

__all__ = ["LocalNode", "Surroundings"]


@dataclass(frozen=True)
class LocalNode:
    """Name and place of this node.

    Args:
        name: name of this node, unique in the run.
        host: address under which the other nodes reach this one.
        slots: number of workers of this node.
        host_id: identifier of the machine, against which strikes are counted.
        incarnation: random identifier of this process.
        ports: first and last port to listen on; ``None`` for any.
        probes_other_ports: whether the others test a port outside of ``ports``, because workers listen on such ports.
        program: digest of the program of this node's job; nodes of another one are refused. ``None`` if it is unknown.
    """

    name: str
    host: str
    slots: int = 1
    host_id: str = ""
    incarnation: str = field(default_factory=new_incarnation)
    ports: tuple[int, int] | None = None
    probes_other_ports: bool = True
    program: str | None = None


class Surroundings:
    """What a rendezvous asks of the rest of its node; these answers are those of a node without an agent."""

    def must_leave(self) -> bool:
        """Return whether this node leaves, so that a wait ends with ``NodeLeaving``. From then on it does."""
        return False

    def get_ready(self) -> bool:
        """Wait until the node could train, before it is a spare of a running round; return whether that took time."""
        return False

    def live_strikes(self, *, fresh: bool) -> int:  # noqa: ARG002 - for those who count
        """Return the number of live strikes against the machine.

        Args:
            fresh: whether other nodes may have written new ones.
        """
        return 0

    def record(self, kind: type[Any], number: int, **fields: Any) -> None:
        """Record an event of a round in the ledger. Thread-safe."""

    def receive_shard(self, connection: Connection, shard: ShardDescription) -> None:  # noqa: ARG002 - as above
        """Take over a connection to the hub whose client offers a snapshot shard. Called from the hub's thread."""
        connection.close("this node holds no shards")

    def progress(self) -> Mapping[str, Any]:
        """Return the fields by which the heartbeat's row shows how far training is. Called from its thread."""
        return {}
