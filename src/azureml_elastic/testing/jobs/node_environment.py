"""The environment variables that Azure ML sets on a node."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from azureml_elastic.environment.names import LOCAL_ADDRESS
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.testing.jobs.body import CommandBody
from azureml_elastic.testing.jobs.machines import Machine
from azureml_elastic.testing.jobs.runs import Run

__all__ = ["distribution_variables", "inherited_variables", "node_variables"]

_FOREIGN = ("AZUREML_", "AZURE_ML_", "DATASET_MOUNT_", "IDENTITY_", "MLFLOW_", "MSI_", "OBO_", "PYTEST_")
_FOREIGN_NAMES = frozenset(
    {"AZURE_STORAGE_CONNECTION_STRING", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"}
    | {"NO_PROXY", "no_proxy"}
)


def node_variables(
    shared: Mapping[str, str],
    run: Run,
    body: CommandBody,
    machine: Machine,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of a node's processes: that of this process without the variables of other jobs or nodes.

    The job's own variables take precedence over all others but the machine's address. ``shared`` has the variables of
    all nodes; ``inputs`` and ``outputs`` have paths, and literals, by name.
    """
    context = {
        "cluster_name": machine.pool,
        "gpu_count": 0,
        "run_attempt_count": run.attempts + 1,
        "vm_priority": machine.tier,
    }
    return {
        **inherited_variables(),
        **shared,
        "PATH": f"{Path(sys.executable).parent}:{UserEnvironment.read().path or '/usr/bin:/bin'}",
        "AZUREML_RUN_ID": run.name,
        "AZUREML_ROOT_RUN_ID": run.root,
        "AZUREML_ARM_PROJECT_NAME": run.experiment,
        **dict.fromkeys(("AZUREML_RUN_TOKEN", "MLFLOW_TRACKING_TOKEN"), "a-token-of-the-local-workspace"),
        "MLFLOW_RUN_ID": run.name,
        "MLFLOW_EXPERIMENT_ID": run.experiment,
        "MLFLOW_EXPERIMENT_NAME": run.experiment,
        "DEFAULT_IDENTITY_CLIENT_ID": "00000000-0000-0000-0000-0000000000cc",
        "AZUREML_CR_COMPUTE_CONTEXT": json.dumps(context),
        **{f"AZURE_ML_INPUT_{name}": value for name, value in inputs.items()},
        **{f"AZURE_ML_OUTPUT_{name}": value for name, value in outputs.items()},
        **body.environment_variables,
        LOCAL_ADDRESS: machine.address,
    }


def inherited_variables() -> dict[str, str]:
    """Return the variables that all nodes have: those of this process that are not of another job or node."""
    kept = {
        name: value
        for name, value in UserEnvironment.read().variables.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1"}  # all nodes share this machine's cores


def distribution_variables(body: CommandBody, number: int, local: int, master: tuple[str, int]) -> dict[str, str]:
    """Return the variables of torch.distributed for a process, if the job has a distribution."""
    if not body.distributed:
        return {}
    return {
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "WORLD_SIZE": str(body.nodes * body.processes),
        "NODE_RANK": str(number),
        "RANK": str(number * body.processes + local),
        "LOCAL_RANK": str(local),
    }
