"""A node that the launcher has started."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.ledger.reading import LineReader
from azureml_elastic.ledger.summary import NodeEnding, NodeSummary
from azureml_elastic.local.processes import NodeProcess
from azureml_elastic.local.run_end import NodeStatus

__all__ = ["LaunchedNode"]


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
        return NodeSummary(name=self.name, exit_code=self.exit_code, ending=status.ending, leftovers=self.leftovers)
