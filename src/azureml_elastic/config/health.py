"""What a node must be able to do before it joins, and what is held against a host that broke a round."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["HealthPolicy"]


class HealthPolicy(ConfigModel):
    """The limits of the check before a node joins, and of the strikes against hosts. ``None`` switches a check off.

    A node *fails* on a folder that cannot be written, too little disk or memory, a clock that is far off, a port that
    nobody reaches, and a GPU that computes wrongly or does not answer. It is *warned* of everything else.

    Args:
        check: whether nodes are checked before they join.
        timeout: for the checks that ask only this machine and its peers.
        mount_timeout: for writing to a folder, which may be a mount that is slow to wake up.
        disk_mib: free MiB that the run's, the checkpoints' and the temporary folder need; a warning below twice that.
        memory_mib: MiB of memory that must be available, also by the container's limit; a warning below twice that.
        shm_mib: MiB of ``/dev/shm`` below which a node is warned: DataLoader workers hand their batches over there.
        open_files: limit of open files below which a node is warned.
        clock_skew: difference to the table server's clock from which on a node fails, because tokens are refused.
        clock_skew_warning: difference from which on a node is warned.
        peers: whether the node's own port, and a member of the running round, must be reachable.
        gpu_timeout: for a process that imports torch and computes on each GPU.
        gpu_free: share of each GPU's memory, 0 to 1, below which a node is warned of other processes there.
        ecc_errors: uncorrected memory errors of a GPU since its driver was loaded that are accepted.
        retry_interval: between two checks of a node that has failed.
        retry_for: how long a node that has failed goes on checking before it exits.
        strike_decay: after which a strike no longer counts, by the table server's clock; 0 s turns strikes off.
        quarantine_strikes: live strikes from which on a host trains only where the minimum of nodes cannot be reached
            without it; ``None`` never.
    """

    check: bool = True
    timeout: PositiveDuration = timedelta(seconds=2)
    mount_timeout: PositiveDuration = timedelta(seconds=10)
    disk_mib: int | None = Field(default=512, ge=0)
    memory_mib: int | None = Field(default=512, ge=0)
    shm_mib: int | None = Field(default=1024, ge=0)
    open_files: int | None = Field(default=1024, ge=0)
    clock_skew: PositiveDuration | None = timedelta(minutes=15)
    clock_skew_warning: PositiveDuration = timedelta(seconds=60)
    peers: bool = True
    gpu_timeout: PositiveDuration | None = timedelta(seconds=60)
    gpu_free: float | None = Field(default=0.5, ge=0, le=1)
    ecc_errors: int | None = Field(default=0, ge=0)
    retry_interval: PositiveDuration = timedelta(seconds=10)
    retry_for: Duration = timedelta(minutes=5)
    strike_decay: Duration = timedelta(hours=1)
    quarantine_strikes: int | None = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _warning_comes_first(self) -> Self:
        if self.clock_skew is not None and self.clock_skew_warning > self.clock_skew:
            raise ValueError(
                f"clock_skew_warning={self.clock_skew_warning.total_seconds():g} s is above "
                f"clock_skew={self.clock_skew.total_seconds():g} s; nobody would ever be warned. Lower the first or "
                "raise the second"
            )
        return self
