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

__all__ = ["Place", "Site", "node_variables"]

_FOREIGN = ("AZUREML_", "AZURE_ML_", "DATASET_MOUNT_", "IDENTITY_", "MSI_", "OBO_", "PYTEST_")
_FOREIGN_NAMES = frozenset(
    {"AZURE_STORAGE_CONNECTION_STRING", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"}
    | {"NO_PROXY", "no_proxy"}
)


@dataclass(frozen=True)
class Site:
    """What all nodes of a workspace have in common.

    Args:
        subscription: id.
        group: the resource group.
        workspace: its name.
        gateway: URL of the gateway.
        api: URL of the workspace's data plane.
        trust: variables by which programs find the gateway and trust it.
    """

    subscription: str
    group: str
    workspace: str
    gateway: str
    api: str
    trust: Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """A process's place in its job.

    Args:
        run: name of the run.
        root: name of the outermost run.
        experiment: that it belongs to.
        attempt: how often the run was started before.
        number: of the node.
        local: of the process on the node.
        first: address of node 0.
        port: free on node 0, for the processes to meet.
        machine: that it runs on.
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
    place: Place,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of a process of a job.

    Args:
        inherited: this process's own, without what names another job or machine.
        body: of the job; its variables come before all others but those of its place.
        site: the workspace.
        place: of the process.
        inputs: paths and literals by name.
        outputs: paths by name.
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
        "AZUREML_RUN_ID": place.run,
        "AZUREML_ROOT_RUN_ID": place.root,
        "AZUREML_ARM_SUBSCRIPTION": site.subscription,
        "AZUREML_ARM_RESOURCEGROUP": site.group,
        "AZUREML_ARM_WORKSPACE_NAME": site.workspace,
        "AZUREML_ARM_PROJECT_NAME": place.experiment,
        "AZUREML_SERVICE_ENDPOINT": site.api,
        "AZUREML_RUN_TOKEN": "a-token-of-the-local-workspace",
        "MSI_ENDPOINT": f"{site.gateway}/token",
        "OBO_ENDPOINT": f"{site.gateway}/token",
        "DEFAULT_IDENTITY_CLIENT_ID": "00000000-0000-0000-0000-0000000000cc",
        "AZUREML_CR_COMPUTE_CONTEXT": json.dumps(
            {
                "cluster_name": place.machine.pool,
                "gpu_count": 0,
                "run_attempt_count": place.attempt + 1,
                "vm_priority": place.machine.tier,
            }
        ),
        **{f"AZURE_ML_INPUT_{name}": value for name, value in inputs.items()},
        **{f"AZURE_ML_OUTPUT_{name}": value for name, value in outputs.items()},
        **body.environment_variables,
        LOCAL_ADDRESS: place.machine.address,
        SCHEDULED_EVENTS: place.events,
        **(_distribution(body, place) if body.distributed else {}),
    }


def _distribution(body: CommandBody, place: Place) -> dict[str, str]:
    rank = place.number * body.processes + place.local
    return {
        "MASTER_ADDR": place.first,
        "MASTER_PORT": str(place.port),
        "WORLD_SIZE": str(body.nodes * body.processes),
        "NODE_RANK": str(place.number),
        "RANK": str(rank),
        "LOCAL_RANK": str(place.local),
    }
