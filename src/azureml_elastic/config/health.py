"""The health of nodes and hosts: checks before a node joins, hangs, and strikes."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["HealthPolicy"]


class HealthPolicy(ConfigModel):
    """The checks of a node before it joins, the watch for hangs, and the strikes against hosts.

    ``None`` disables a check. A node *fails* the checks on a folder that is not writable, insufficient disk space or
    memory, an excessive clock difference, an unreachable port, or a GPU that hangs or computes incorrectly. All other
    findings are warnings. ``docs/explanation/failures.md`` lists the checks with their limits.

    Args:
        hang_timeout: time without a completed step after which the stacks of all workers are dumped and the round is
            restarted. ``"auto"`` derives it from measured step times; ``None`` disables hang detection.
        hang_timeout_floor: lower bound of the derived timeout. The first step of a round has at least four times this
            limit.
        check: whether nodes are checked before they join.
        timeout: time limit of the checks that involve only this machine and its peers; folders, which may be mounts
            with a slow first access, have five times as long.
        disk_mib: minimum free disk space in MiB in the run's, the checkpoints' and the temporary folder; a warning is
            reported below twice this value.
        memory_mib: minimum available memory in MiB, within the container's limit; a warning is reported below twice
            this value.
        gpu_timeout: time limit of the subprocess that imports torch and runs a computation on each GPU.
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
    disk_mib: int | None = Field(default=512, ge=0)
    memory_mib: int | None = Field(default=512, ge=0)
    gpu_timeout: PositiveDuration | None = timedelta(seconds=60)
    retry_for: Duration = timedelta(minutes=5)
    strike_decay: Duration = timedelta(hours=1)
    quarantine_strikes: int | None = Field(default=2, ge=1)
