"""How the processes of an elastic job are started, checked, restarted and shut down."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, Span, Takes, default

Recovery = Literal["restart", "in_process"]
"""How the workers recover from the loss of another worker; see :class:`ElasticDistribution`."""

Framework = Literal["pytorch", "dask", "ray", "horovod"]
"""What a round runs: workers of the program on all nodes, or a cluster of an engine that one program uses."""

_PORTS_OF_A_DASK_WORKER = 10
"""Dask divides the range among workers and nannies: each gets five ports, of which the node has taken four at most."""


class ElasticDistribution(ConfigModel):
    """The processes of an elastic job.

    Args:
        framework: what a round runs. ``pytorch`` runs the program as the workers of all nodes. ``horovod`` does so in
            Horovod's elastic mode. ``dask`` and ``ray`` run a cluster on all nodes, and the program once, on the first
            node of the round. ``docs/how-to/engines.md`` states which guarantees hold.
        process_count_per_instance: number of workers per node, or ``"auto"`` for one per GPU (one on a node without
            GPUs).
        nodes_per_replica: number of nodes that together hold one copy of a model that is sharded on ``run.mesh()``. A
            round has whole replicas, and nodes that are left over wait until a further replica is complete; the minimum
            is rounded up to whole replicas. ``"all"`` shards over all nodes of a round, whatever their number: nothing
            is left over, but the loss of a node costs the steps since the last snapshot or checkpoint. Has no effect on
            models that are not sharded on that mesh, except that rounds have whole replicas.
        max_restarts: number of worker failures that the *whole run* may have within an hour before it fails;
            an older one no longer counts if the run has made progress since. Lost and preempted nodes do not count.
        recovery: how workers recover from the loss of another worker. ``restart`` starts new worker processes, which
            receive the state of the old ones in memory. ``in_process`` keeps unaffected processes and puts them into
            a new process group; ``docs/explanation/recovery.md`` states its requirements on a script.
        handover_timeout: time limit for workers of an ended round to hand over their state or to become ready for the
            next round. After it, the steps since the last checkpoint are lost.
        preload_workers: whether each node runs a preload server, which imports the script's modules once and forks the
            workers, wherever forking is safe.
        stop_timeout: time between SIGTERM and SIGKILL when the workers of an ended round are stopped, as under
            torchrun. On a node that is being preempted they have what is left of its notice instead.
        newcomer_timeout: time for which new nodes wait until a program without a session has saved a file that it has
            looked for at its start, before they end its round nevertheless. ``None`` lets them wait for it, or until
            the round ends for another reason: a program that does not continue from its save would lose all its work.
            Has no effect on programs with a session, which new nodes join at a step boundary.
    """

    type: Literal["elastic"] = "elastic"
    framework: Framework = "pytorch"
    process_count_per_instance: int | Literal["auto"] = "auto"
    nodes_per_replica: int | Literal["all"] = 1
    max_restarts: int = Field(default=3, ge=0)
    recovery: Recovery = "restart"
    handover_timeout: Takes[Duration, Span] = default(timedelta(seconds=5))
    preload_workers: bool = True
    stop_timeout: Takes[Duration, Span] = default(timedelta(seconds=30))
    newcomer_timeout: Takes[Duration | None, Span | None] = default(None)

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
    def _counts_are_possible(self) -> Self:
        # Bounds of a field would be those of one member of its union, and pydantic would report the other member, too.
        for name, word in (("process_count_per_instance", "auto"), ("nodes_per_replica", "all")):
            count = getattr(self, name)
            if count != word and count < 1:
                raise ValueError(f'{name}={count} is below the limit of 1; give a positive number or "{word}"')
        size = self.nodes_per_replica
        if size != 1 and self.framework != "pytorch":
            raise ValueError(
                f"nodes_per_replica={size!r} has no effect with framework={self.framework!r}, whose models are not "
                "sharded on run.mesh(). Leave it out"
            )
        return self

    def check_ports(self, ports: tuple[int, int] | None) -> None:
        """Check that the first and the last port on which nodes listen leave enough for all that a round runs.

        Raises:
            ValueError: there are too few.
        """
        count = self.process_count_per_instance
        needed = _PORTS_OF_A_DASK_WORKER * (count if isinstance(count, int) else 1)
        if ports is not None and self.listens_in_range and ports[1] - ports[0] + 1 < needed:
            raise ValueError(
                f"port_range={ports[0]}-{ports[1]} has {ports[1] - ports[0] + 1} ports; with framework="
                f"{self.framework!r} a node needs {_PORTS_OF_A_DASK_WORKER} for each of its workers, {needed} in all, "
                "and so does each further node on the same machine. Give for example (29400, 29500)"
            )
