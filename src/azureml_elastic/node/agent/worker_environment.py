"""The environment that workers find: as under torchrun, and that of the agent without the table's secret."""

from __future__ import annotations

from collections.abc import MutableMapping

from azureml_elastic.checkpoint.storage.locations import AZURE_CONNECTION_STRING, is_azure
from azureml_elastic.environment import names as variables
from azureml_elastic.node.agent.tracked_run import tracked_run_variables
from azureml_elastic.node.host.addresses import interface_of, machine_interfaces
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.rendezvous.state.assignment import Assignment

__all__ = ["set_inherited_variables", "withheld_variables", "worker_environments"]


def set_inherited_variables(identity: NodeIdentity, channel: str, environ: MutableMapping[str, str]) -> None:
    """Set the variables that are the same for all workers of a node in all rounds.

    Args:
        identity: identity of the node.
        channel: path of the agent's socket.
        environ: environment of the agent, which the workers inherit.
    """
    environ[variables.RUN_DIR] = str(identity.folder)
    environ[variables.PLAN] = identity.plan.to_json()
    environ[variables.CHANNEL] = channel
    environ[variables.LOCAL_ADDRESS] = identity.host
    environ.update(tracked_run_variables(identity.plan, environ))
    interface = identity.interface or interface_of(identity.host, machine_interfaces())
    if interface is not None:  # the workers' data goes the same way, unless the job configures another
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def withheld_variables(table_variable: str | None, checkpoints: str | None) -> frozenset[str]:
    """Return the environment variables of the agent that workers do not inherit.

    Workers never access the table. They get its connection string only where the same variable opens their checkpoints.

    Args:
        table_variable: variable with the connection string that opened the table, ``None`` without one.
        checkpoints: path or URL of the checkpoints in the job's policy.
    """
    if table_variable is None:
        return frozenset()
    needed = table_variable == AZURE_CONNECTION_STRING and checkpoints is not None and is_azure(checkpoints)
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
