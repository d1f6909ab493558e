"""Shared parts of the tests of whole runs: timings of the nodes, and evaluation of reports."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from azureml_elastic.config import CheckpointPolicy, RendezvousTimings, TableRendezvous
from azureml_elastic.ledger.events import Event, NodeStarted, Progress, RoundEntered, WorkersStarted
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.ledger.summary import Paths, Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED

GATHERING = TableRendezvous(timings=RendezvousTimings(settle_timeout=timedelta(minutes=1)))
"""The first round waits for all announced nodes, which start at very different speeds on a busy machine."""


def gathering_cluster(folder: Path, chaos: str = "", seed: int = 0, **options: Any) -> LocalCluster:
    """Return a cluster of forked nodes that gather, two by default, under a schedule of faults.

    Args:
        folder: where the folder of the run, ``run``, is made.
    """
    faults = parse_schedule(chaos, seed) if chaos else None
    defaults = {"nodes": (1, 2), "start": FORKED, "chaos": faults, "run_dir": folder / "run", "audit": True}
    defaults |= {"checkpoint": CheckpointPolicy(every_steps=10), "rendezvous": GATHERING}
    return LocalCluster(**{**defaults, **options})


def assert_whole(report: Report) -> None:
    """Verify that a run has succeeded with each sample, and that no process is left."""
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit is not None
    assert report.audit.complete, report.audit
    assert all(node.leftovers == 0 for node in report.nodes)


def after_gathering(report: Report, full: int) -> tuple[int, ...]:
    """Return the world sizes from the first round with all nodes on; a late node joins after the first round."""
    return report.world_sizes[report.world_sizes.index(full) :]


def together(workspace: Path, folder: Path) -> Paths:
    """Bring together what all machines of a workspace have on their disks, those of the evicted ones too."""
    paths = Paths.of(folder)
    for disk in workspace.glob("nodes/*/work/outputs/azureml-elastic"):
        shutil.copytree(disk, paths.run_dir, dirs_exist_ok=True)
    return paths


@contextlib.contextmanager
def at_step(run_dir: Path, step: int, world_size: int, act: Callable[[list[Event]], None]) -> Iterator[None]:
    """Call ``act`` with all events beside the run, once so many workers have trained to this step."""

    def watch() -> None:
        reader = EventReader(run_dir / "events")
        events: list[Event] = []
        while not over.wait(0.05):
            events += reader.read()
            world = next((each.world_size for each in reversed(events) if isinstance(each, RoundEntered)), 0)
            if world == world_size and any(isinstance(each, Progress) and each.step >= step for each in events):
                act(events)
                return

    over = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def workers_at_step(events: Path, step: int, node: str) -> WorkersStarted:
    """Wait until a step is reached, and return the start of the workers that a node has then.

    Args:
        events: folder of the run's events, which need not exist yet.
        step: step of the run.
        node: name of the node, or ``rank0``.
    """
    until = time.monotonic() + 120
    seen: list[Event] = []
    reader = None
    while time.monotonic() < until:
        if reader is None and events.exists():
            reader = EventReader(events)
        seen += reader.read() if reader is not None else []
        leaders = {event.round: event.node for event in seen if isinstance(event, RoundEntered) and event.rank == 0}
        started = [
            event
            for event in seen
            if isinstance(event, WorkersStarted)
            if event.node == (leaders.get(event.round) if node == "rank0" else node)
        ]
        progress = [event for event in seen if isinstance(event, Progress) and event.step >= step]
        if started and any(event.round >= started[-1].round for event in progress):
            return started[-1]
        time.sleep(0.02)
    raise TimeoutError(f"Step {step} was not reached.")


def processes_of(workers: WorkersStarted, events: Path) -> dict[str, int]:
    """Return the ids of the processes of a node with these workers; it has the round's store if it is rank 0's.

    Args:
        events: folder of the run's events.
    """
    started = [event for event in EventReader(events).read() if isinstance(event, NodeStarted)]
    agent = next(event.pid for event in started if event.node == workers.node)
    preload = psutil.Process(psutil.Process(workers.pids[0]).ppid())
    assert preload.ppid() == agent
    stores = [child.pid for child in preload.children() if child.pid not in workers.pids and _listens(child)]
    found = {"worker": workers.pids[0], "agent": agent, "preload server": preload.pid}
    return {**found, "round store": stores[0]} if stores else found


def _listens(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # a fork that tries an import, for instance
        return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))
    return False
