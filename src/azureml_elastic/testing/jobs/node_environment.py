"""The environment variables that Azure ML sets on a node."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from azureml_elastic.config.environment import LOCAL_ADDRESS, SCHEDULED_EVENTS
from azureml_elastic.testing.api.body import CommandBody
from azureml_elastic.testing.jobs.machines import Machine

__all__ = ["JobProcess", "Site", "node_variables"]

_FOREIGN = ("AZUREML_", "AZURE_ML_", "DATASET_MOUNT_", "IDENTITY_", "MSI_", "OBO_", "PYTEST_")
_FOREIGN_NAMES = frozenset(
    {"AZURE_STORAGE_CONNECTION_STRING", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"}
    | {"NO_PROXY", "no_proxy"}
)


@dataclass(frozen=True)
class Site:
    """Properties that all nodes of a workspace share.

    Args:
        subscription: subscription id.
        group: name of the resource group.
        workspace: name of the workspace.
        gateway: URL of the gateway.
        api: URL of the workspace's data plane.
        trust: environment variables that route programs through the gateway and make them trust it.
    """

    subscription: str
    group: str
    workspace: str
    gateway: str
    api: str
    trust: Mapping[str, str]


@dataclass(frozen=True)
class JobProcess:
    """Identity of a process within its job.

    Args:
        run: name of the run.
        root: name of the outermost run.
        experiment: experiment name.
        attempt: number of earlier attempts of the run.
        number: number of the node, from 0.
        local: local rank of the process.
        first: address of node 0.
        port: free port of node 0, for the processes' rendezvous.
        machine: machine of the node.
        events: address of the machine's metadata service.
    """

    run: str
    root: str
    experiment: str
    attempt: int
    number: int
    local: int
    first: str
    port: int
    machine: Machine
    events: str


def node_variables(
    inherited: Mapping[str, str],
    body: CommandBody,
    site: Site,
    process: JobProcess,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of a process of a job.

    Args:
        inherited: environment of this process; variables of other jobs or machines are left out.
        body: command of the job; its variables take precedence over all others but those of the process.
        site: workspace of the node.
        process: identity of the process.
        inputs: paths and literals by input name.
        outputs: paths by output name.
    """
    kept = {
        name: value for name, value in inherited.items() if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    return {
        "OMP_NUM_THREADS": "1",  # all nodes share this machine's cores
        **kept,
        **site.trust,
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', '/usr/bin:/bin')}",
        "PYTHONUNBUFFERED": "1",
        "AZUREML_RUN_ID": process.run,
        "AZUREML_ROOT_RUN_ID": process.root,
        "AZUREML_ARM_SUBSCRIPTION": site.subscription,
        "AZUREML_ARM_RESOURCEGROUP": site.group,
        "AZUREML_ARM_WORKSPACE_NAME": site.workspace,
        "AZUREML_ARM_PROJECT_NAME": process.experiment,
        "AZUREML_SERVICE_ENDPOINT": site.api,
        "AZUREML_RUN_TOKEN": "a-token-of-the-local-workspace",
        "MSI_ENDPOINT": f"{site.gateway}/token",
        "OBO_ENDPOINT": f"{site.gateway}/token",
        "DEFAULT_IDENTITY_CLIENT_ID": "00000000-0000-0000-0000-0000000000cc",
        "AZUREML_CR_COMPUTE_CONTEXT": json.dumps(
            {
                "cluster_name": process.machine.pool,
                "gpu_count": 0,
                "run_attempt_count": process.attempt + 1,
                "vm_priority": process.machine.tier,
            }
        ),
        **{f"AZURE_ML_INPUT_{name}": value for name, value in inputs.items()},
        **{f"AZURE_ML_OUTPUT_{name}": value for name, value in outputs.items()},
        **body.environment_variables,
        LOCAL_ADDRESS: process.machine.address,
        SCHEDULED_EVENTS: process.events,
        **(_distribution(body, process) if body.distributed else {}),
    }


def _distribution(body: CommandBody, process: JobProcess) -> dict[str, str]:
    rank = process.number * body.processes + process.local
    return {
        "MASTER_ADDR": process.first,
        "MASTER_PORT": str(process.port),
        "WORLD_SIZE": str(body.nodes * body.processes),
        "NODE_RANK": str(process.number),
        "RANK": str(rank),
        "LOCAL_RANK": str(process.local),
    }
