"""The nodes of a local run from outside: who is in the newest round, and how to kill a node."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from azureml_elastic.ledger.events import NodeStarted, RoundEntered
from azureml_elastic.ledger.reading import read_events

__all__ = ["LocalNodes", "kill_tree"]


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
        """Kill all processes of a node."""
        kill_tree(self._agent(node))

    def preempt(self, node: str) -> None:
        """Give a node a preemption notice."""
        os.kill(self._agent(node), signal.SIGTERM)

    def _agent(self, node: str) -> int:
        found = (each for each in read_events(self._events) if isinstance(each, NodeStarted))
        return next(each.pid for each in found if each.node == node)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, which are stopped first so that they start no others meanwhile."""
    agent = psutil.Process(pid)
    stopped: set[psutil.Process] = set()
    while found := {agent, *agent.children(recursive=True)} - stopped:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= found
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
