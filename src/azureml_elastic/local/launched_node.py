"""A node that the launcher has started, and the environment that it starts in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from azureml_elastic.config import Plan
from azureml_elastic.environment import names as environment
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.ledger.reading import LineReader
from azureml_elastic.ledger.summary import NodeEnding, NodeSummary, Paths
from azureml_elastic.local.azurite import TableChoice
from azureml_elastic.local.processes import NodeProcess
from azureml_elastic.local.run_end import NodeStatus

__all__ = ["LaunchedNode", "node_environment"]


@dataclass
class LaunchedNode:
    """A started node and the faults injected into it."""

    process: NodeProcess
    output: LineReader
    forced: NodeEnding | None = None
    """Ending that the launcher has caused."""
    exit_code: int | None = None
    leftovers: int = 0
    last_line: str = ""
    frozen: bool = False
    resumes: bool = True
    began: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    ended: float | None = None

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.process.name

    @property
    def status(self) -> NodeStatus:
        """State for the decision whether the run is over."""
        ending: NodeEnding = "running" if self.resumes else "frozen"
        if self.exit_code is not None:
            ending = self.forced or "exited"
        return NodeStatus(self.name, ending, self.exit_code, self.process.log, self.last_line)

    @property
    def summary(self) -> NodeSummary:
        """State for the report."""
        status = self.status
        return NodeSummary(
            name=self.name,
            exit_code=self.exit_code,
            ending=status.ending,
            leftovers=self.leftovers,
            began=self.began,
            ended=self.ended,
        )


def node_environment(name: str, plan: Plan, table: TableChoice, paths: Paths) -> dict[str, str]:
    """Return the environment of a node: this process's own, with the node's plan, name and folders."""
    return {
        **UserEnvironment.read().for_nodes(),
        **table.environment,
        environment.PLAN: plan.to_json(),
        environment.NODE_ID: name,
        environment.RUN_DIR: str(paths.run_dir),
        environment.LOCAL_ADDRESS: "127.0.0.1",
    }
