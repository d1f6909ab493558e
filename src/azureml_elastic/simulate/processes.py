"""The processes of simulated nodes, each with what it does since when."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.ledger.accounting import Activity, Cause
from azureml_elastic.simulate.accounts import Accounts, Life

__all__ = ["Process", "Processes"]


@dataclass
class Process:
    """Process of a node. Its seconds are accounted up to ``at``; those of members while they train, by ``Training``.

    Args:
        pool: index of its pool.
        began: start of the process.
        at: time up to which its seconds are accounted.
        ready: whether it may be in a round.
        entered: whether it has been in one.
        waiting_since: time since which it waits for a round.
        activity: what it does since ``at``.
        cause: cause of that.
    """

    name: str
    pool: int
    began: float
    at: float
    ready: bool = False
    entered: bool = False
    waiting_since: float = 0.0
    activity: Activity = "starting"
    cause: Cause | None = None


class Processes(dict[str, Process]):
    """Running processes by the name of their node.

    Args:
        accounts: accounts of the run.
    """

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self._accounts = accounts

    def start(self, name: str, pool: int, now: float) -> Process:
        """Start the process of a node."""
        process = self[name] = Process(name, pool, now, now)
        return process

    def mark(self, process: Process, now: float, activity: Activity, cause: Cause | None = None) -> None:
        """Account for a process's time until now, and continue with an activity."""
        self._accounts.add(process.activity, now - process.at, process.cause)
        process.at, process.activity, process.cause = now, activity, cause

    def end(self, name: str, now: float) -> None:
        """End the process of a node."""
        process = self.pop(name)
        self.mark(process, now, "idle")
        self._accounts.lives.append(Life(name, process.pool, process.began, now))
