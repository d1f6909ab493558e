"""Group of this node's workers: started or kept over rounds, assigned their ranks, with the environment that they find.

**The MLflow run that the workers of all nodes log to.** Azure ML sets ``MLFLOW_RUN_ID`` to the job that a process
belongs to. Where every node is a job of its own, rank 0 moves from job to job with each change of the round, and its
metrics would be spread over all of them.

Workers find the common run in ``AZUREML_RUN_ID``, too: azureml-mlflow leaves the status of the run that this variable
names to the service, whereas the end of a script's ``with mlflow.start_run()`` sets the status of any other run.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping

from azureml_elastic.checkpoint.storage.remote import is_azure
from azureml_elastic.config import Plan
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import RunFailed
from azureml_elastic.ipc.worker_messages import Assign
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.worker_processes import Workers
from azureml_elastic.node.failures.classification import root_cause
from azureml_elastic.node.host.addresses import interface_of, machine_interfaces
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer


def tracked_run_variables(plan: Plan, environment: NodeEnvironment) -> dict[str, str]:
    """Return the variables that let the workers of all nodes log to one run: that of the run's first job.

    Empty where the nodes share a job, outside Azure ML, and where the command has set another run.
    """
    job = environment.job
    if not job or environment.mlflow_run != job:
        return {}
    root = environment.root_job if plan.resources.effective_placement == "fan_out" else None
    run = environment.first_job or root or job
    return {} if run == job else {"MLFLOW_RUN_ID": run, "AZUREML_RUN_ID": run}


def inherited_variables(identity: NodeIdentity, channel: str, environment: NodeEnvironment) -> dict[str, str]:
    """Return the variables that are the same for all workers of a node in all rounds, beside those of the agent.

    Args:
        channel: path of the agent's socket.
    """
    found = {
        variables.RUN_DIR: str(identity.folder),
        variables.PLAN: identity.plan.to_json(),
        variables.CHANNEL: channel,
        variables.LOCAL_ADDRESS: identity.host,
        **tracked_run_variables(identity.plan, environment),
    }
    interface = identity.interface or interface_of(identity.host, machine_interfaces())
    if interface is not None:  # the workers' data goes the same way, unless the job configures another
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            found[name] = environment.variables.get(name, interface)
    return found


def withheld_variables(table_variable: str | None, checkpoints: str | None) -> frozenset[str]:
    """Return the environment variables of the agent that workers do not inherit.

    Workers never access the table. They get its connection string only where the same variable opens their checkpoints.

    Args:
        table_variable: variable with the connection string that opened the table, ``None`` without one.
        checkpoints: path or URL of the checkpoints in the job's policy.
    """
    if table_variable is None:
        return frozenset()
    needed = (
        table_variable == variables.AZURE_STORAGE_CONNECTION_STRING
        and checkpoints is not None
        and is_azure(checkpoints)
    )
    return frozenset() if needed else frozenset({table_variable})


def worker_environments(
    assignment: Assignment, run_id: str, max_restarts: int, engine_key: bytes = b""
) -> dict[int, dict[str, str]]:
    """Return, by local rank, what torchrun would set for the workers of this node, and the key of an engine."""
    round_ = assignment.round
    ranks = assignment.global_ranks
    host, port = assignment.store_address
    shared = {
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "WORLD_SIZE": str(round_.world_size),
        "GROUP_RANK": str(assignment.rank),
        "GROUP_WORLD_SIZE": str(len(round_.members)),
        "ROLE_NAME": "worker",
        "ROLE_WORLD_SIZE": str(round_.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # Workers share keys by the restart count, which must therefore be the same on old nodes and new ones.
        "TORCHELASTIC_RESTART_COUNT": str(round_.number - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        variables.ROUND: str(round_.number),
        variables.HISTORY: f"{round_.losses} {round_.seconds:.0f}",
    }
    if engine_key:
        shared[variables.ENGINE_KEY] = engine_key.hex()
    return {
        local_rank: {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(rank),
            variables.WORKER: f"{rank} {round_.world_size} {host} {port}",
        }
        for local_rank, rank in enumerate(ranks)
    }


_LOG = logging.getLogger(__name__)

_READY_SECONDS = 600.0
"""How long a newcomer waits for the imports of its preload server, after which it joins without them."""

_WARM_SECONDS = 30.0
"""How long a newcomer gets ready beyond its script's imports."""

_CHECK_SECONDS = 10.0
"""Time between two reads of the table by a newcomer that gets ready, in case the run ends meanwhile."""

_NEEDS_SESSION = (
    'recovery="in_process" starts workers before their ranks are known, so RANK and WORLD_SIZE are not set until '
    'train.start() returns. Call it before they are read, or submit with recovery="restart".'
)

_RANKS = re.compile(r"\b(RANK|WORLD_SIZE)\b")


class WorkerGroup:
    """The workers of one node, started anew in each round or staying over several. For the agent's thread.

    Args:
        slots: how many there are.
        handover_seconds: timeout for workers of the previous round to wait for the next one.
        interval: longest wait in seconds until the workers are looked at again.

    Attributes:
        workers: the processes.
        stays: whether they stay over the rounds where they can.
    """

    def __init__(
        self,
        workers: Workers,
        channel: Channel,
        slots: int,
        rendezvous: Rendezvous,
        *,
        stays: bool,
        handover_seconds: float,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = workers
        self._channel = channel
        self._slots = slots
        self._rdzv = rendezvous
        self._handover = handover_seconds
        self._interval = interval
        self._clock = clock
        self._warm_since: float | None = None
        self._ready_at: float | None = None
        self.stays = stays

    def all(self, local_ranks: frozenset[int]) -> bool:
        """Whether these are all of them."""
        return len(local_ranks) == self._slots

    def warm_up(self, *, settle: bool) -> bool:
        """Wait until new workers would start fast, before this node asks for a place; other nodes train meanwhile.

        The wait ends early where workers cannot be preloaded, and ten minutes after the first call.

        Args:
            settle: whether to wait, for up to 30 s, for imports that only make the first steps faster, too.

        Returns:
            Whether it has waited.

        Raises:
            RunSucceeded, RunFailed: the run has ended.
            NodeLeaving: this node must leave.
        """
        began = self._clock()
        self._warm_since = began if self._warm_since is None else self._warm_since
        check_at = began + _CHECK_SECONDS
        waited = False
        while not self.workers.settled:
            now = self._clock()
            if self.workers.ready:
                self._ready_at = now if self._ready_at is None else self._ready_at
                if not settle or now - self._ready_at >= _WARM_SECONDS:
                    break
            elif now - self._warm_since >= _READY_SECONDS:
                if not waited:
                    break
                _LOG.warning(
                    "The script's imports have not ended within %.0f s; joining without them. The other nodes may have "
                    "to wait for this one's workers.",
                    _READY_SECONDS,
                )
                break
            if now >= check_at:
                self._rdzv.given_up()
                check_at = now + _CHECK_SECONDS
            waited = True
            self._rdzv.wait(self._interval)
        return waited

    def get_ready(self) -> None:
        """Have workers that wait for a place: those of the round before, or new ones that have run up to their session.

        A node asks for a place only when they do, so that nobody waits for its imports and its data.

        Raises:
            RunSucceeded: the run has ended.
            RunFailed: it has, or a new worker has ended before it came so far.
            NodeLeaving: this node must leave.
        """
        until = time.monotonic() + self._handover
        while self.workers.alive and not self.all(self._channel.workers.parked) and time.monotonic() < until:
            self._rdzv.wait(self._interval)
        # Where the others have gone on without this node, these may be at another place than the furthest step. They
        # hand their state over to new ones.
        if not self._rdzv.is_left_out() and self.workers.alive and self.all(self._channel.workers.parked):
            return
        self.workers.begin_stopping()
        self.workers.finish_stopping()
        self._channel.begin(0, self._slots, None)
        known = {variables.ROUND: "0", "LOCAL_WORLD_SIZE": str(self._slots)}
        self._start({local_rank: {**known, "LOCAL_RANK": str(local_rank)} for local_rank in range(self._slots)})
        while not self.all(self._channel.workers.parked):
            self._rdzv.wait(self._interval)
            # A script without a session ends, or fails, before it parks: nothing would ever come.
            if self.workers.exit_codes:
                raise self._early_end()

    def enter(
        self,
        assignment: Assignment,
        pointer: CheckpointPointer | None,
        run_id: str,
        max_restarts: int,
        engine_key: bytes = b"",
    ) -> None:
        """Give the workers their places in a round.

        Args:
            pointer: the checkpoint's row in the table, on rank 0's node only.
            engine_key: key for the process of an engine, empty without one.
        """
        self.workers.finish_stopping()  # whatever they hand over is for the next ones
        round_ = assignment.round
        ranks = assignment.global_ranks
        # Before the workers have their places: the channel refuses workers of another round than its own.
        self._channel.begin(round_.number, len(ranks), pointer, members=round_.members, keep=self.stays)
        environments = worker_environments(assignment, run_id, max_restarts, engine_key)
        if self.stays:
            self._channel.workers.assign(
                {
                    local_rank: Assign(round_.number, rank, round_.world_size, environments[local_rank])
                    for local_rank, rank in enumerate(ranks)
                }
            )
        else:
            self._start(environments)

    def _start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        own = {variables.CHANNEL: self._channel.path}
        if self.stays:
            prefixes = {local_rank: f"[{self._rdzv.node} worker {local_rank}]: " for local_rank in environments}
        else:
            prefixes = {local_rank: f"[rank{each['RANK']}]: " for local_rank, each in environments.items()}
        self.workers.start({local_rank: {**own, **each} for local_rank, each in environments.items()}, prefixes)

    def _early_end(self) -> RunFailed:
        failures = self.workers.failures()
        if not failures:
            return RunFailed(f"A worker ended without train.start(). {_NEEDS_SESSION}", 1)
        failure = root_cause(failures)
        advice = f" {_NEEDS_SESSION}" if _RANKS.search(failure.message) else ""
        return RunFailed(f"{failure.message}\nA worker failed before it could take part.{advice}", failure.exit_code)
