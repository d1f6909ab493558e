"""A node of a job: its folders and its processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from azureml_elastic.ledger.events import Progress
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.processes import NodeProcess, NodeProcesses
from azureml_elastic.testing.api.body import CommandBody
from azureml_elastic.testing.jobs.expressions import expand
from azureml_elastic.testing.jobs.machines import Machine
from azureml_elastic.testing.jobs.node_environment import JobProcess, Site, node_variables
from azureml_elastic.testing.storage.locations import Location
from azureml_elastic.testing.storage.mirror import Mirror

__all__ = ["Bindings", "Node", "start_node"]

_EVENTS = Path("outputs/azureml-elastic/events")


@dataclass(frozen=True)
class Bindings:
    """Locations of a job's data.

    Args:
        code: location of the code, ``None`` for none.
        inputs: locations of the inputs that are not literals, by name.
        outputs: locations of all outputs, by name.
    """

    code: Location | None
    inputs: Mapping[str, Location]
    outputs: Mapping[str, Location]


@dataclass
class Node:
    """A running node.

    Args:
        number: number of the node within the job, from 0.
        machine: machine of the node.
        folder: working folder of its processes.
        processes: started processes.
        uploads: outputs to upload when the node has ended: local paths by location.
    """

    number: int
    machine: Machine
    folder: Path
    processes: list[NodeProcess]
    uploads: dict[Location, Path]
    taken: bool = False
    """Whether the machine's eviction was announced or has happened."""
    gone: bool = False
    """Whether the machine is gone together with its disk."""
    _events: EventReader = field(init=False)
    _step: int = 0

    def __post_init__(self) -> None:
        self._events = EventReader(self.folder / _EVENTS)

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
        steps = [event.step for event in self._events.read() if isinstance(event, Progress)]
        self._step = max([self._step, *steps])
        return self._step


def start_node(
    body: CommandBody,
    bindings: Bindings,
    first: JobProcess,
    *,
    site: Site,
    mirror: Mirror,
    processes: NodeProcesses,
    root: Path,
) -> Node:
    """Copy code and data to a machine and start its processes.

    Args:
        body: command to execute.
        bindings: locations of code, inputs and outputs.
        first: identity of the node's first process within the job.
        site: workspace of the node.
        mirror: blobs of the storage account as files.
        processes: context in which the processes are started.
        root: parent folder of the machines' folders.

    Raises:
        UsageError: an expression in the command refers to an unknown input or output.
    """
    home = root / first.machine.name
    folder = home / "work"
    folder.mkdir(parents=True)
    if bindings.code is not None:
        mirror.copy(bindings.code, folder)
    inputs = {name: value.literal for name, value in body.inputs.items() if value.literal is not None}
    for name, location in bindings.inputs.items():
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
    for name, location in bindings.outputs.items():
        if body.outputs[name].mode == "mount":
            path = mirror.bring(location)
        else:
            path = home / "outputs" / name
            uploads[location] = path
        is_file = body.outputs[name].type == "uri_file"
        (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)
        outputs[name] = str(path)
    command = ("/bin/bash", "-c", f"cd {_quoted(folder)} && {{ {expand(body.command, inputs, outputs)}\n}}")
    started = []
    for local in range(body.processes):
        environment = node_variables(os.environ, body, site, replace(first, local=local), inputs, outputs)
        started.append(processes.start(f"{first.machine.name}-{local}", command, environment))
    return Node(first.number, first.machine, folder, started, uploads)


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
