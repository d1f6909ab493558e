"""Where the nodes of a run find each other, and how patient they are."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["PORTS_OF_A_NODE", "Credential", "RendezvousTimings", "TableRendezvous"]

PORTS_OF_A_NODE = 3
"""On which a node listens at a time, at most: its hub, the store of its round, and the store of the next one."""

_PORTS = (1024, 65535)

Credential = Literal["auto", "managed_identity", "on_behalf_of", "connection_string", "developer"]
"""Which identity opens the table.

``auto`` takes, in this order, what the node offers: its managed identity, the identity of the user who
submitted (on-behalf-of), a connection string in the environment, the developer's own login.
"""


class RendezvousTimings(ConfigModel):
    """The patience of the rendezvous. Every interval is measured on one machine's monotonic clock.

    Args:
        heartbeat_interval: between two beats on the connection to rank 0's node.
        heartbeat_timeout: silence on that connection after which the other side counts as lost.
        join_timeout: for the members of a sealed round to reach rank 0's node.
        settle_timeout: how long the first round, once it has its minimum, waits for nodes that announced
            themselves but are still importing.
        rejoin_timeout: how long a reopened round, once it has its minimum, waits for the survivors.
        takeover_delay: after which the next node in line seals a round that nobody seals.
        rescale_debounce: without another newcomer, after which the running round makes room for those that have come;
            four times that at most.
        table_heartbeat_interval: between two signs of life of rank 0's node in the table; a round whose rank 0
            cannot be reached and gave no sign for twice as long is given up.
        max_failed_rounds: how many rounds in a row may break because nodes cannot reach each other, before the
            run is failed.
    """

    heartbeat_interval: PositiveDuration = timedelta(seconds=1)
    heartbeat_timeout: PositiveDuration = timedelta(seconds=3)
    join_timeout: PositiveDuration = timedelta(seconds=5)
    settle_timeout: Duration = timedelta(seconds=10)
    rejoin_timeout: Duration = timedelta(seconds=5)
    takeover_delay: PositiveDuration = timedelta(seconds=1)
    rescale_debounce: Duration = timedelta(seconds=0.5)
    table_heartbeat_interval: PositiveDuration = timedelta(seconds=5)
    max_failed_rounds: int = Field(default=20, ge=1)

    @model_validator(mode="after")
    def _timeout_covers_interval(self) -> Self:
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout={self.heartbeat_timeout.total_seconds():g} s is below twice "
                f"heartbeat_interval={self.heartbeat_interval.total_seconds():g} s; one late beat would count "
                "as a lost node. Raise the first or lower the second"
            )
        return self


class TableRendezvous(ConfigModel):
    """A table that all nodes of a run can reach.

    Args:
        endpoint: the account's table URL (``https://<account>.table.core.windows.net``), or the path of an
            SQLite file for nodes that share one machine. ``None`` takes the storage account of the Azure ML
            workspace that the node runs in.
        table: the table's name, 3 to 63 letters and digits; made when it is missing.
        credential: which identity opens the table.
        client_id: of a user-assigned managed identity; ``None`` takes the compute's default.
        connection_string_variable: the environment variable that holds a connection string. The string itself
            never enters the plan.
        port_range: the first and the last port on which nodes listen for each other, for firewalls; ``None`` takes any
            that are free. ``docs/network.md`` tells what else needs to be open.
        advertise: where the other nodes reach a node: the name of one of its network interfaces (``"eth0"``), a range
            of addresses (``"10.0.0.0/16"``) or one address; ``None`` takes the address on the way to the table.
        timings: patience of the rendezvous.
    """

    endpoint: str | None = None
    table: str = Field(default="azuremlelastic", pattern=r"^[A-Za-z][A-Za-z0-9]{2,62}$")
    credential: Credential = "auto"
    client_id: str | None = None
    connection_string_variable: str = "AZURE_STORAGE_CONNECTION_STRING"
    port_range: tuple[int, int] | None = None
    advertise: str | None = Field(default=None, pattern=r"^\S+$")
    timings: RendezvousTimings = RendezvousTimings()

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
    def _range_is_one(cls, value: str | None) -> str | None:
        if value is not None and "/" in value:
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError as error:
                raise ValueError(
                    f"advertise={value!r} is no range of addresses: {error}. Give one such as 10.0.0.0/16, the name of "
                    "a network interface, or an address"
                ) from error
        return value
