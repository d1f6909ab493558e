"""A node of a job: its folders and its processes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from azureml_elastic.environment.names import LOCAL_ADDRESS, SCHEDULED_EVENTS
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.faults.metadata_service import MetadataService
from azureml_elastic.local.processes import NodeProcess, NodeProcesses
from azureml_elastic.testing.jobs.body import CommandBody
from azureml_elastic.testing.jobs.machines import Machine, Machines
from azureml_elastic.testing.jobs.runs import Run
from azureml_elastic.testing.jobs.search_space import expand
from azureml_elastic.testing.storage import Location, Mirror

# What is of another job, cloud or test, as this process may run in one; and what would lead requests past the gateway.
_FOREIGN = ("AZUREML_", "AZURE_ML_", "DATASET_MOUNT_", "IDENTITY_", "MLFLOW_", "MSI_", "OBO_", "PYTEST_")
_FOREIGN_NAMES = frozenset(
    {"AZURE_STORAGE_CONNECTION_STRING", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"}
    | {"NO_PROXY", "no_proxy"}
)


def _node_variables(
    job: CommandJob, setting: Setting, machine: Machine, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a node's processes: that of this process without the variables of other jobs or nodes.

    The job's own variables take precedence over all others but those of the machine. ``inputs`` and ``outputs`` have
    paths, and literals, by name.
    """
    run = job.run
    context = {
        "cluster_name": machine.pool,
        "gpu_count": 0,
        "run_attempt_count": run.attempts + 1,
        "vm_priority": machine.tier,
    }
    return {
        **inherited_variables(),
        **setting.variables,
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
        **job.body.environment_variables,
        LOCAL_ADDRESS: machine.address,
        SCHEDULED_EVENTS: setting.metadata.address(machine.name),
    }


def inherited_variables() -> dict[str, str]:
    """Return the variables that all nodes have: those of this process that are not of another job or node."""
    kept = {
        name: value
        for name, value in UserEnvironment.read().variables.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    # Unbuffered, as logs are followed while the job runs.
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1"}  # all nodes share this machine's cores


def _distribution_variables(body: CommandBody, number: int, local: int, master: tuple[str, int]) -> dict[str, str]:
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


LEDGER = Path("outputs/azureml-elastic")
"""Folder with the events and samples of a node, below its working folder."""

_WORK = "work"


@dataclass(frozen=True)
class Setting:
    """Objects that all jobs of a workspace share."""

    variables: Mapping[str, str]
    """Environment variables of all nodes."""
    machines: Machines
    processes: NodeProcesses
    mirror: Mirror
    metadata: MetadataService
    root: Path
    """Parent folder of the machines' folders."""
    requeue: bool
    """Whether a preempted job is restarted from the beginning."""
    wrappers: Path | None = None
    """Folder of the commands that stand for the interpreters; ``None`` for no such commands."""
    grows: bool = True
    """Whether a job gets more nodes than it starts with, up to its maximum."""

    def ledgers(self) -> list[Path]:
        """Return the folders with the events and samples of all nodes so far."""
        return sorted(self.root.glob(f"*/{_WORK}/{LEDGER.as_posix()}"))


@dataclass(frozen=True)
class CommandJob:
    """A command job, and the locations of its code, of its inputs that are not literals, and of all its outputs."""

    run: Run
    body: CommandBody
    code: Location | None
    inputs: Mapping[str, Location]
    outputs: Mapping[str, Location]


@dataclass
class Node:
    """A running node."""

    number: int
    """Number within the job, from 0."""
    machine: Machine
    folder: Path
    """Working folder of the processes."""
    processes: list[NodeProcess]
    uploads: dict[Location, Path]
    """Outputs to upload when the node has ended: local paths by location."""
    evicted: bool = False
    """Whether the machine's eviction was announced or has happened."""
    lost: bool = False
    """Whether the machine is gone together with its disk."""
    _events: EventReader = field(init=False)
    _picture: Picture = field(default_factory=Picture, init=False)

    def __post_init__(self) -> None:
        self._events = EventReader(self.folder / LEDGER / "events")

    def exit_code(self) -> int | None:
        """Return the first non-zero exit code, ``None`` if there is none and a process still runs, otherwise 0."""
        codes = [process.exit_code() for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def terminate(self) -> None:
        """Send SIGTERM to the process groups of the started shells."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def is_alive(self) -> bool:
        """Return whether any process of the node is still running."""
        return any(process.tree() for process in self.processes)

    def kill(self) -> None:
        """Kill all processes of the node."""
        for process in self.processes:
            process.kill()

    @property
    def step(self) -> int:
        """Number of training steps in the node's event file."""
        self._picture.apply(self._events.read())
        return self._picture.now.step or 0


def start_node(job: CommandJob, setting: Setting, number: int, machine: Machine, master: tuple[str, int]) -> Node:
    """Copy code and data to a machine and start the node's processes; ``master`` is address and port of node 0."""
    body, mirror, home = job.body, setting.mirror, setting.root / machine.name
    folder = home / _WORK
    folder.mkdir(parents=True)
    if job.code is not None:
        mirror.copy(job.code, folder)
    inputs = {name: value.literal for name, value in body.inputs.items() if value.literal is not None}
    for name, location in job.inputs.items():
        mode = body.inputs[name].mode
        if mode == "mount":
            inputs[name] = str(mirror.bring(location))
        elif mode == "direct":
            inputs[name] = str(body.inputs[name].uri)
        else:
            target = home / "inputs" / name / (location.path.rpartition("/")[2] or name)
            mirror.copy(location, target)
            inputs[name] = str(target)
    outputs: dict[str, str] = {}
    uploads: dict[Location, Path] = {}
    for name, location in job.outputs.items():
        if body.outputs[name].mode == "mount":
            path = mirror.bring(location)
        else:
            path = uploads[location] = home / "outputs" / name
        is_file = body.outputs[name].type == "uri_file"
        (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)
        outputs[name] = str(path)
    # The line feed ends what the last line of a command may leave open, such as a comment.
    command = ("/bin/bash", "-c", f"cd {shlex.quote(str(folder))} && {{ {expand(body.command, inputs, outputs)}\n}}")
    variables = _node_variables(job, setting, machine, inputs, outputs)
    if setting.wrappers is not None:
        variables["PATH"] = f"{setting.wrappers}{os.pathsep}{variables['PATH']}"
    processes = [
        setting.processes.start(
            f"{machine.name}-{local}", command, {**variables, **_distribution_variables(body, number, local, master)}
        )
        for local in range(body.processes)
    ]
    return Node(number, machine, folder, processes, uploads)
