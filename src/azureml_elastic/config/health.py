"""The health of nodes and hosts: checks before a node joins, hangs, and strikes."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["HealthPolicy"]


class HealthPolicy(ConfigModel):
    """The checks of a node before it joins, the watch for hangs, and the strikes against hosts.

    ``None`` disables a check. A node *fails* the check on a folder that is not writable, insufficient disk space or
    memory, an excessive clock difference, an unreachable port, or a GPU that hangs or computes incorrectly. All other
    findings are warnings.

    Args:
        hang_timeout: time without a completed step after which the stacks of all workers are dumped and the round is
            restarted. ``"auto"`` derives it from measured step times; ``None`` disables hang detection.
        hang_timeout_floor: lower bound of the derived timeout. The first step of a round has at least four times this
            limit.
        check: whether nodes are checked before they join.
        timeout: time limit of the checks that involve only this machine and its peers.
        mount_timeout: time limit for writing to a folder, which may be a mount with a slow first access.
        disk_mib: minimum free disk space in MiB in the run's, the checkpoints' and the temporary folder; a warning is
            reported below twice this value.
        memory_mib: minimum available memory in MiB, within the container's limit; a warning is reported below twice
            this value.
        shm_mib: size of ``/dev/shm`` in MiB below which a warning is reported; DataLoader workers pass batches
            through it.
        open_files: limit of open file descriptors below which a warning is reported.
        clock_skew: difference to the table server's clock above which a node fails, because its access tokens would
            be rejected.
        clock_skew_warning: difference to the table server's clock above which a warning is reported.
        peers: whether the node's own port and a member of the running round must be reachable.
        gpu_timeout: time limit of the subprocess that imports torch and runs a computation on each GPU.
        gpu_free: fraction of each GPU's memory, 0 to 1, that should be free; a warning about other processes is
            reported below it.
        ecc_errors: accepted number of uncorrected memory errors of a GPU since its driver was loaded.
        retry_interval: time between two checks of a node that has failed.
        retry_for: time after which a node that keeps failing exits.
        strike_decay: time after which a strike expires, by the table server's clock. 0 s disables strikes.
        quarantine_strikes: number of unexpired strikes at which a host is quarantined: its nodes train only if the
            minimum node count cannot be reached without them. ``None`` disables quarantine.
    """

    # In the order of CheckpointPolicy.every: typing caches unions without regard to their order, so the module that is
    # imported first would decide that of the error messages of both.
    hang_timeout: Literal["auto"] | PositiveDuration | None = "auto"
    hang_timeout_floor: PositiveDuration = timedelta(minutes=5)
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
                f"clock_skew_warning={self.clock_skew_warning.total_seconds():g} s is above clock_skew="
                f"{self.clock_skew.total_seconds():g} s, so no warning would precede a failure. Lower the first or "
                "raise the second"
            )
        return self
