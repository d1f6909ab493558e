"""Where the nodes of a run find each other, and how patient they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.spec.base import Duration, PositiveDuration, Spec

__all__ = ["Credential", "RendezvousTimings", "TableRendezvous"]

Credential = Literal["auto", "managed_identity", "on_behalf_of", "connection_string", "developer"]
"""Which identity opens the table.

``auto`` takes, in this order, what the node offers: its managed identity, the identity of the user who
submitted (on-behalf-of), a connection string in the environment, the developer's own login.
"""


class RendezvousTimings(Spec):
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
        witness_interval: between two signs of life of rank 0's node in the table; a round whose rank 0
            cannot be reached and gave no sign for twice as long is given up.
        fruitless_rounds: how many rounds in a row may break because nodes cannot reach each other, before the
            run is failed.
    """

    heartbeat_interval: PositiveDuration = timedelta(seconds=1)
    heartbeat_timeout: PositiveDuration = timedelta(seconds=3)
    join_timeout: PositiveDuration = timedelta(seconds=5)
    settle_timeout: Duration = timedelta(seconds=10)
    rejoin_timeout: Duration = timedelta(seconds=5)
    takeover_delay: PositiveDuration = timedelta(seconds=1)
    rescale_debounce: Duration = timedelta(seconds=0.5)
    witness_interval: PositiveDuration = timedelta(seconds=5)
    fruitless_rounds: int = Field(default=20, ge=1)

    @model_validator(mode="after")
    def _timeout_covers_interval(self) -> Self:
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout={self.heartbeat_timeout.total_seconds():g} s is below twice "
                f"heartbeat_interval={self.heartbeat_interval.total_seconds():g} s; one late beat would count "
                "as a lost node. Raise the first or lower the second"
            )
        return self


class TableRendezvous(Spec):
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
        timings: patience of the rendezvous.
    """

    endpoint: str | None = None
    table: str = Field(default="azuremlelastic", pattern=r"^[A-Za-z][A-Za-z0-9]{2,62}$")
    credential: Credential = "auto"
    client_id: str | None = None
    connection_string_variable: str = "AZURE_STORAGE_CONNECTION_STRING"
    timings: RendezvousTimings = RendezvousTimings()
