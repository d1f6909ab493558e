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
from collections.abc import Mapping

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

_NEEDS_SESSION = (
    'recovery="in_process" starts workers before their ranks are known, so RANK and WORLD_SIZE are not set until '
    'train.start() returns. Call it before they are read, or submit with recovery="restart".'
)

_RANKS = re.compile(r"\b(RANK|WORLD_SIZE)\b")


class WorkerGroup:
    """The workers of one node, started anew in each round or staying over several. For the agent's thread.

    Attributes:
        workers: the processes.
        stays: whether they stay over the rounds where they can.
    """

    def __init__(
        self,
        workers: Workers,
        channel: Channel,
        slots: int,
        node: str,
        *,
        stays: bool,
    ) -> None:
        self.workers = workers
        self._channel = channel
        self._slots = slots
        self._node = node
        self.stays = stays

    def all(self, local_ranks: frozenset[int]) -> bool:
        """Whether these are all of them."""
        return len(local_ranks) == self._slots

    def replace(self) -> None:
        """End the workers, which hand their state over, and start new ones that run up to their session."""
        self.workers.begin_stopping()
        self.workers.finish_stopping()
        self._channel.begin(0, self._slots, None)
        known = {variables.ROUND: "0", "LOCAL_WORLD_SIZE": str(self._slots)}
        self._start({local_rank: {**known, "LOCAL_RANK": str(local_rank)} for local_rank in range(self._slots)})

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
            prefixes = {local_rank: f"[{self._node} worker {local_rank}]: " for local_rank in environments}
        else:
            prefixes = {local_rank: f"[rank{each['RANK']}]: " for local_rank, each in environments.items()}
        self.workers.start({local_rank: {**own, **each} for local_rank, each in environments.items()}, prefixes)

    def early_end(self) -> RunFailed:
        """Return how the run fails, as a worker has ended before it could take part."""
        failures = self.workers.failures()
        if not failures:
            return RunFailed(f"A worker ended without train.start(). {_NEEDS_SESSION}", 1)
        failure = root_cause(failures)
        advice = f" {_NEEDS_SESSION}" if _RANKS.search(failure.message) else ""
        return RunFailed(f"{failure.message}\nA worker failed before it could take part.{advice}", failure.exit_code)
