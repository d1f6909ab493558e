"""A node of a job: its folders, its processes, and its end."""

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
from azureml_elastic.testing.jobs.node_environment import Place, Site, node_variables
from azureml_elastic.testing.storage.locations import Location
from azureml_elastic.testing.storage.mirror import Mirror

__all__ = ["Bindings", "Node", "start_node"]

_EVENTS = Path("outputs/azureml-elastic/events")


@dataclass(frozen=True)
class Bindings:
    """Where a job's data lies.

    Args:
        code: ``None`` for a job without.
        inputs: those that are no literals.
        outputs: all.
    """

    code: Location | None
    inputs: Mapping[str, Location]
    outputs: Mapping[str, Location]


@dataclass
class Node:
    """A running node.

    Args:
        number: within the job.
        machine: that it runs on.
        folder: the current folder of its processes.
        processes: that were started.
        uploads: outputs that go to the blobs when the node has ended.
    """

    number: int
    machine: Machine
    folder: Path
    processes: list[NodeProcess]
    uploads: dict[Location, Path]
    taken: bool = False
    """Whether its machine was announced to go, or is gone."""
    gone: bool = False
    """Whether its machine is gone, with all that was on its disk."""
    _events: EventReader = field(init=False)
    _step: int = 0

    def __post_init__(self) -> None:
        self._events = EventReader(self.folder / _EVENTS)

    def exit_code(self) -> int | None:
        """Return ``None`` while a process runs and none has failed, else the first code that is not 0, else 0."""
        codes = [process.exit_code() for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def terminate(self) -> None:
        """Tell the shells and their programs to end; what those have started themselves is theirs to end."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def is_alive(self) -> bool:
        """Return whether anything that the node has started is still there."""
        return any(process.tree() for process in self.processes)

    def kill(self) -> None:
        """End all that the node has started."""
        for process in self.processes:
            process.kill()

    @property
    def step(self) -> int:
        """Training steps that the node has written down."""
        steps = [event.step for event in self._events.read() if isinstance(event, Progress)]
        self._step = max([self._step, *steps])
        return self._step


def start_node(
    body: CommandBody,
    bindings: Bindings,
    place: Place,
    *,
    site: Site,
    mirror: Mirror,
    processes: NodeProcesses,
    root: Path,
) -> Node:
    """Bring code and data to a machine and start its processes.

    Args:
        body: of the job.
        bindings: where its data lies.
        place: of the node; each process gets its own from it.
        site: the workspace.
        mirror: the blobs.
        processes: the context in which they are started.
        root: of all machines' folders.

    Raises:
        UsageError: the command has an expression that names nothing.
    """
    home = root / place.machine.name
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
        environment = node_variables(os.environ, body, site, replace(place, local=local), inputs, outputs)
        started.append(processes.start(f"{place.machine.name}-{local}", command, environment))
    return Node(place.number, place.machine, folder, started, uploads)


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
