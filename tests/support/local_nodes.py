"""The nodes of a local run from outside: who is in the newest round, and how to kill a node."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from azureml_elastic.ledger.events import NodeStarted, RoundEntered
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.processes import MARKER
from tests.support.waiting import until


class LocalNodes:
    """The nodes of a run in a folder.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._events = run / "events"

    def members(self) -> tuple[str, ...]:
        """Return the nodes of the newest round in rank order."""
        entries = [each for each in read_events(self._events) if isinstance(each, RoundEntered)]
        return max(entries, key=lambda each: each.round).members

    def kill(self, node: str) -> None:
        """Kill all processes of a node, which are stopped first so that they start no others meanwhile."""
        agent = psutil.Process(self._agent(node))
        marker = agent.environ()[MARKER]
        stopped: set[psutil.Process] = set()
        while found := _processes(agent, marker) - stopped:
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= found
        for process in stopped - {agent}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: not any(_runs(process) for process in stopped - {agent}))
        agent.kill()  # the last one: what is left then counts as left behind

    def preempt(self, node: str) -> None:
        """Give a node a preemption notice."""
        os.kill(self._agent(node), signal.SIGTERM)

    def _agent(self, node: str) -> int:
        found = (each for each in read_events(self._events) if isinstance(each, NodeStarted))
        return next(each.pid for each in found if each.node == node)


def _processes(agent: psutil.Process, marker: str) -> set[psutil.Process]:
    """Return the processes of a node: the agent's descendants, and those that have left its tree."""
    found = {agent, *agent.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARKER) == marker:
                found.add(process)
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
