"""How the nodes of a run find each other: the table, addresses, ports and timeouts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration, Span, Takes, default

PORTS_OF_A_NODE = 3
"""Largest number of ports on which a node listens at a time: its hub, its round's store, and the next round's store."""

_PORTS = (1024, 65535)

Credential = Literal["auto", "managed_identity", "on_behalf_of", "connection_string", "developer"]
"""Identity with which the table is opened.

``auto`` selects the first available one: the managed identity of the node, the identity of the user who submitted the
job (on-behalf-of), a connection string in the environment, the developer's login.
"""


class RendezvousTimings(ConfigModel):
    """Heartbeat interval and timeouts of the rendezvous, measured on each machine's own monotonic clock.

    Args:
        heartbeat_interval: time between two heartbeats on the connection to rank 0's node.
        heartbeat_timeout: silence on that connection after which the other side counts as lost until its heartbeats are
            known: a third of it where no node of the run has paused so far, up to one and a half of it otherwise.
        join_timeout: time for the members of a sealed round to connect to rank 0's node.
        settle_timeout: maximum time for which the first round, once it has its minimum, waits for announced nodes that
            are still importing modules.
        rejoin_timeout: maximum time for which a reopened round, once it has its minimum, waits for the remaining
            members of the previous round.
        takeover_delay: time after which the next candidate seals a round that the current candidate has not sealed.
        rescale_debounce: time without a further newcomer after which the running round is reopened for the waiting
            nodes; at most four times this value after the first one.
        table_heartbeat_interval: time between two heartbeats of rank 0's node in the table; a round is given up if its
            rank 0 is unreachable and has written no heartbeat for twice this interval.
        max_failed_rounds: number of consecutive rounds that may end because their nodes cannot connect to each other,
            before the run fails.
    """

    heartbeat_interval: Takes[PositiveDuration, Span] = default(timedelta(seconds=0.5))
    heartbeat_timeout: Takes[PositiveDuration, Span] = default(timedelta(seconds=3))
    join_timeout: Takes[PositiveDuration, Span] = default(timedelta(seconds=5))
    settle_timeout: Takes[Duration, Span] = default(timedelta(seconds=10))
    rejoin_timeout: Takes[Duration, Span] = default(timedelta(seconds=5))
    takeover_delay: Takes[PositiveDuration, Span] = default(timedelta(seconds=1))
    rescale_debounce: Takes[Duration, Span] = default(timedelta(seconds=0.5))
    table_heartbeat_interval: Takes[PositiveDuration, Span] = default(timedelta(seconds=5))
    max_failed_rounds: int = Field(default=20, ge=1)

    @model_validator(mode="after")
    def _timeout_covers_interval(self) -> Self:
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout={self.heartbeat_timeout.total_seconds():g} s is below twice "
                f"heartbeat_interval={self.heartbeat_interval.total_seconds():g} s; one late heartbeat would count "
                "as a lost node. Raise the first or lower the second"
            )
        return self


class TableRendezvous(ConfigModel):
    """A table that all nodes of a run can reach.

    Args:
        endpoint: table URL of the storage account (``https://<account>.table.core.windows.net``), or path of an SQLite
            file for nodes that share one machine; ``None`` for the storage account of the node's Azure ML workspace.
        table: name of the table, 3 to 63 letters and digits; the table is created when it is missing.
        credential: identity with which the table is opened.
        client_id: client ID of a user-assigned managed identity; ``None`` for the compute's default.
        connection_string_variable: name of the environment variable that holds a connection string, which itself is
            never part of the plan. Workers do not inherit it, unless it opens their checkpoints, too.
        port_range: first and last port on which nodes listen for each other, for firewalls; ``None`` for any free
            ports. ``docs/how-to/nodes.md`` lists what else needs to be open.
        advertise: address under which the other nodes reach a node: the name of a network interface (``"eth0"``), a
            range of addresses (``"10.0.0.0/16"``) or one address; ``None`` for the address on the route to the table.
        timings: heartbeat interval and timeouts.
    """

    endpoint: str | None = None
    table: str = Field(default="azuremlelastic", pattern=r"^[A-Za-z][A-Za-z0-9]{2,62}$")
    credential: Credential = "auto"
    client_id: str | None = None
    connection_string_variable: str = "AZURE_STORAGE_CONNECTION_STRING"
    port_range: Takes[tuple[int, int] | None, tuple[int, int] | list[int] | None] = default(None)
    advertise: str | None = Field(default=None, pattern=r"^\S+$")
    timings: Takes[RendezvousTimings, RendezvousTimings | Mapping[str, Any]] = default(RendezvousTimings())

    @field_validator("port_range")
    @classmethod
    def _ports_are_enough(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is None:
            return value
        low, high = value
        lowest, highest = _PORTS
        if not lowest <= low < high <= highest:
            raise ValueError(
                f"port_range={low}-{high} must rise and lie within {lowest}-{highest}; give for example (29400, 29500)"
            )
        if high - low + 1 < PORTS_OF_A_NODE:
            raise ValueError(
                f"port_range={low}-{high} has {high - low + 1} ports; a node needs {PORTS_OF_A_NODE}, and so does each "
                "further node on the same machine. Give for example (29400, 29500)"
            )
        return value

    @field_validator("advertise")
    @classmethod
    def _range_is_valid(cls, value: str | None) -> str | None:
        if value is not None and "/" in value:
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError as error:
                raise ValueError(
                    f"advertise={value!r} is not a range of addresses: {error}. Give one such as 10.0.0.0/16, the name "
                    "of a network interface, or an address"
                ) from error
        return value
