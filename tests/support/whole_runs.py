"""Shared parts of the tests of whole runs: timings of the nodes, and evaluation of reports."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.ledger.events import Event, Progress, RoundEntered, WorkersStarted
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.ledger.summary import Report

GATHERING = TableRendezvous(timings=RendezvousTimings(settle_timeout=timedelta(minutes=1)))
"""The first round waits for all announced nodes, which start at very different speeds on a busy machine."""


def after_gathering(report: Report, full: int) -> tuple[int, ...]:
    """Return the world sizes from the first round with all nodes on; a late node joins after the first round."""
    return report.world_sizes[report.world_sizes.index(full) :]


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
