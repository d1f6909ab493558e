"""How the processes of an elastic job are started, checked, restarted and shut down."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration
from azureml_elastic.config.rendezvous import TableRendezvous

__all__ = ["METADATA_ADDRESS", "ElasticDistribution", "Framework", "HealthPolicy", "PreemptionPolicy", "Recovery"]

METADATA_ADDRESS = "http://169.254.169.254/metadata"
"""Azure's Instance Metadata Service, at the link-local address that every virtual machine reaches it by."""

Recovery = Literal["restart", "in_process"]
"""How the workers recover from the loss of another worker; see :class:`ElasticDistribution`."""

Framework = Literal["pytorch", "dask", "ray", "horovod"]
"""What a round runs: workers of the program on all nodes, or a cluster of an engine that one program uses."""

_PORTS_OF_A_DASK_WORKER = 10
"""Dask divides the range among workers and nannies: each gets five ports, of which the node has taken four at most."""


def _metadata_address(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"scheduled_events={value!r} is no address ({error}); give {METADATA_ADDRESS}") from error
    wrong = parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or port == 0
    if wrong or any(character.isspace() for character in value):
        raise ValueError(
            f"scheduled_events={value!r} is not of the form http://host[:port]/path; give {METADATA_ADDRESS}, or null "
            "where there is no metadata service"
        )
    return value.rstrip("/")


class PreemptionPolicy(ConfigModel):
    """The sources of preemption notices and the response to them.

    SIGTERM or SIGINT to a node's agent always counts as a notice.

    Args:
        grace: maximum time between the notice and the workers' exit, within which they reach a step boundary and save
            a checkpoint.
        scheduled_events: base address of the metadata service that announces Azure's scheduled events, without the
            ``/scheduledevents`` suffix. ``None`` disables polling.
        lead: time before an event's earliest start at which the node leaves, for event types other than ``Preempt``,
            which may be announced days ahead.
        marker: path of a file whose existence is a notice; ``{node}`` is replaced by the node's identifier. ``None``
            disables the file.
        poll_interval: time between two queries of the metadata service and of the marker file.
        acknowledge: whether a node that has left approves the event, so that Azure may start it at once.
    """

    grace: Duration = timedelta(seconds=25)
    scheduled_events: Annotated[str, AfterValidator(_metadata_address)] | None = METADATA_ADDRESS
    lead: Duration = timedelta(minutes=2)
    marker: str | None = Field(default=None, min_length=1)
    poll_interval: PositiveDuration = timedelta(seconds=1)
    acknowledge: bool = False


class HealthPolicy(ConfigModel):
    """The limits of the health check before a node joins, and of the strikes against hosts.

    ``None`` disables a check. A node *fails* the check on a folder that is not writable, insufficient disk space or
    memory, an excessive clock difference, an unreachable port, or a GPU that hangs or computes incorrectly. All other
    findings are warnings.

    Args:
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


class ElasticDistribution(ConfigModel):
    """The processes of an elastic job.

    Args:
        framework: what a round runs. ``pytorch`` runs the program as the workers of all nodes. ``horovod`` does so in
            Horovod's elastic mode. ``dask`` and ``ray`` run a cluster on all nodes, and the program once, on the first
            node of the round. ``docs/explanation/engines.md`` states which guarantees hold.
        process_count_per_instance: number of workers per node, or ``"auto"`` for one per GPU (one on a node without
            GPUs).
        nodes_per_replica: number of nodes that together hold one copy of a model that is sharded on ``run.mesh()``. A
            round has whole replicas, and nodes that are left over wait until a further replica is complete; the minimum
            is rounded up to whole replicas. ``"all"`` shards over all nodes of a round, whatever their number: nothing
            is left over, but the loss of a node costs the steps since the last snapshot or checkpoint. Has no effect on
            models that are not sharded on that mesh, except that rounds have whole replicas.
        max_restarts: number of worker failures that the *whole run* may have within ``restart_window`` before it
            fails. Lost and preempted nodes do not count.
        restart_window: time after which a failure no longer counts if the run has made progress since. ``None`` counts
            every failure. The default of one hour stops a program that fails in a loop, and tolerates failures that
            are too rare to cost much time.
        recovery: how workers recover from the loss of another worker. ``restart`` starts new worker processes, which
            receive the state of the old ones in memory. ``in_process`` keeps unaffected processes and puts them into
            a new process group; ``docs/explanation/recovery.md`` states its requirements on a script.
        handover_timeout: time limit for workers of an ended round to hand over their state or to become ready for the
            next round. After it, the steps since the last checkpoint are lost.
        preload_workers: whether each node runs a preload server, which imports the script's modules once and forks the
            workers, wherever forking is safe.
        monitor_interval: time between two checks of the local workers.
        stop_timeout: time between SIGTERM and SIGKILL when the workers of an ended round are stopped, as under
            torchrun. On a node that is being preempted they have what is left of its notice instead.
        newcomer_timeout: time for which new nodes wait until a program without a session has saved a file that it has
            looked for at its start, before they end its round nevertheless. ``None`` lets them wait for it, or until
            the round ends for another reason: a program that does not continue from its save would lose all its work.
            Has no effect on programs with a session, which new nodes join at a step boundary.
        preemption: detection of and response to preemption notices.
        hang_timeout: time without a completed step after which the stacks of all workers are dumped and the round is
            restarted. ``"auto"`` derives it from measured step times; ``None`` disables hang detection.
        hang_timeout_floor: lower bound of the derived timeout. The first step of a round has at least four times this
            limit.
        health: health check before a node joins, and quarantine of hosts with repeated failures.
        rendezvous: table through which the nodes find each other.
    """

    type: Literal["elastic"] = "elastic"
    framework: Framework = "pytorch"
    process_count_per_instance: int | Literal["auto"] = "auto"
    nodes_per_replica: int | Literal["all"] = 1
    max_restarts: int = Field(default=3, ge=0)
    restart_window: PositiveDuration | None = timedelta(hours=1)
    recovery: Recovery = "restart"
    handover_timeout: Duration = timedelta(seconds=5)
    preload_workers: bool = True
    monitor_interval: PositiveDuration = timedelta(seconds=0.1)
    stop_timeout: Duration = timedelta(seconds=30)
    newcomer_timeout: Duration | None = None
    preemption: PreemptionPolicy = PreemptionPolicy()
    # In the order of CheckpointPolicy.every: typing caches unions without regard to their order, so the module that is
    # imported first would decide that of the error messages of both.
    hang_timeout: Literal["auto"] | PositiveDuration | None = "auto"
    hang_timeout_floor: PositiveDuration = timedelta(minutes=5)
    health: HealthPolicy = HealthPolicy()
    rendezvous: TableRendezvous = TableRendezvous()

    @property
    def runs_engine(self) -> bool:
        """Whether a round runs the cluster of an engine."""
        return self.framework != "pytorch"

    @property
    def listens_in_range(self) -> bool:
        """Whether all that a round runs listens on ports of the rendezvous' ``port_range``, as the agents do."""
        return self.framework == "dask"

    def keeps_processes(self, *, opens_session: bool) -> bool:
        """Return whether the processes of a node stay over the rounds.

        Args:
            opens_session: whether the program uses this library.
        """
        return self.runs_engine or (opens_session and self.recovery == "in_process")

    @model_validator(mode="after")
    def _count_is_positive(self) -> Self:
        count = self.process_count_per_instance
        if isinstance(count, int) and count < 1:
            raise ValueError(
                f'process_count_per_instance={count} is below the limit of 1; give a positive count or "auto"'
            )
        return self

    def node_limits(self, minimum: int, maximum: int) -> tuple[int, int]:
        """Return the smallest and the largest number of nodes of a round, which are multiples of a replica's.

        Args:
            minimum: number of nodes below which training pauses.
            maximum: number of nodes that may train at once.

        Raises:
            ValueError: the maximum is below the minimum of whole replicas.
        """
        size = self.nodes_per_replica
        if size == "all":
            return minimum, maximum
        least, most = -(-minimum // size) * size, maximum - maximum % size
        if least > most:
            raise ValueError(
                f"max_instance_count={maximum} is below the {least} nodes that min_instance_count={minimum} makes in "
                f"whole replicas of nodes_per_replica={size}. Raise it to {least}, or lower one of the others"
            )
        return least, most

    @model_validator(mode="after")
    def _replicas_are_possible(self) -> Self:
        size = self.nodes_per_replica
        if isinstance(size, int) and size < 1:
            raise ValueError(f'nodes_per_replica={size} is below the limit of 1; give a positive number or "all"')
        if size != 1 and self.framework != "pytorch":
            raise ValueError(
                f"nodes_per_replica={size!r} has no effect with framework={self.framework!r}, whose models are not "
                "sharded on run.mesh(). Leave it out"
            )
        return self

    @model_validator(mode="after")
    def _ports_are_enough(self) -> Self:
        ports, count = self.rendezvous.port_range, self.process_count_per_instance
        needed = _PORTS_OF_A_DASK_WORKER * (count if isinstance(count, int) else 1)
        if ports is not None and self.listens_in_range and ports[1] - ports[0] + 1 < needed:
            raise ValueError(
                f"port_range={ports[0]}-{ports[1]} has {ports[1] - ports[0] + 1} ports; with framework="
                f"{self.framework!r} a node needs {_PORTS_OF_A_DASK_WORKER} for each of its workers, {needed} in all, "
                "and so does each further node on the same machine. Give for example (29400, 29500)"
            )
        return self
