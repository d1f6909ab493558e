"""A cluster on one machine: each node is a process tree that runs the production agent, and faults are injected."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from azureml_elastic.config import BatchPolicy, ElasticDistribution, FixedGlobalBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.summary import Paths, Report
from azureml_elastic.local.faults.model import Schedule
from azureml_elastic.local.launch import Launch
from azureml_elastic.local.processes import NodeProcesses
from azureml_elastic.local.settings import check_table, local_plan, open_table_choice
from azureml_elastic.local.view import View

__all__ = ["NODE_COMMAND", "LocalCluster", "new_run_dir"]

NODE_COMMAND = (sys.executable, "-m", "azureml_elastic.node")
"""Starts a node."""


class LocalCluster:
    """Runs a program on nodes that are process trees of this machine.

    Args:
        nodes: the fewest that train, and how many are started (the most that train).
        processes_per_node: workers a node.
        chaos: the faults to inject.
        run_dir: a new folder for the run's files; ``None`` makes one below ``./runs``.
        table: ``sqlite``, ``azurite`` or the table URL of a storage account; faults of the table need one that is
            reached over plain HTTP, as the emulator is.
        checkpoint_steps: steps between two checkpoints; ``None`` takes the default by time.
        snapshot_steps: steps between two copies in memory; ``None`` takes none.
        snapshot_path: a folder for these copies, in place of the nodes' local disks; ``None`` has none.
        audit: whether to prove that each sample was seen exactly once.
        max_restarts: worker failures that the run may have.
        batch: what becomes of it when the world size changes.
        distribution: everything else about the processes; the arguments above come before it.
        timeout_s: after which the run is stopped and has failed.
        exit_grace_s: for the other nodes to exit once the run has ended.
        view: shows the run; ``None`` shows nothing.
        node_command: starts a node; ``--`` and the program follow.
    """

    def __init__(
        self,
        nodes: tuple[int, int] = (1, 3),
        *,
        processes_per_node: int = 1,
        chaos: Schedule | None = None,
        run_dir: Path | None = None,
        table: str = "sqlite",
        checkpoint_steps: int | None = None,
        snapshot_steps: int | None = None,
        snapshot_path: Path | None = None,
        audit: bool = False,
        max_restarts: int = 3,
        batch: BatchPolicy = FixedGlobalBatch(),  # noqa: B008 - frozen
        distribution: ElasticDistribution | None = None,
        timeout_s: float | None = None,
        exit_grace_s: float = 20.0,
        view: View | None = None,
        node_command: Sequence[str] = NODE_COMMAND,
    ) -> None:
        self._nodes = nodes
        self._processes_per_node = processes_per_node
        self._chaos = chaos
        self._run_dir = run_dir
        self._table = table
        self._checkpoint_steps = checkpoint_steps
        self._snapshot_steps = snapshot_steps
        self._snapshot_path = snapshot_path
        self._audit = audit
        self._max_restarts = max_restarts
        self._batch = batch
        self._distribution = distribution or ElasticDistribution()
        self._timeout_s = timeout_s
        self._exit_grace_s = exit_grace_s
        self._view = view
        self._node_command = tuple(node_command)

    def run(self, argv: Sequence[str]) -> Report:
        """Run a program to its end and write ``report.json``; when this returns, no process is left.

        Args:
            argv: the program and its arguments.

        Raises:
            UsageError: the run's folder has been used, the table is of no known form, or the faults do not apply to it.
        """
        check_table(self._table, self._chaos)  # before a folder is made
        paths = _prepare(self._run_dir or new_run_dir())
        run_id = f"local-{secrets.token_hex(4)}"
        with contextlib.ExitStack() as stack:
            table = stack.enter_context(open_table_choice(self._table, paths, self._chaos))
            plan = local_plan(
                nodes=self._nodes,
                processes_per_node=self._processes_per_node,
                max_restarts=self._max_restarts,
                distribution=self._distribution,
                checkpoint_steps=self._checkpoint_steps,
                batch=self._batch,
                snapshot_steps=self._snapshot_steps,
                snapshot_path=self._snapshot_path,
                audit=self._audit,
                table=table,
                paths=paths,
                run_id=run_id,
            )
            processes = stack.enter_context(NodeProcesses(paths.logs))
            if self._view is not None:
                stack.enter_context(self._view)
            launch = Launch(
                plan=plan,
                table=table,
                paths=paths,
                command=(*self._node_command, "--", *argv),
                processes=processes,
                schedule=self._chaos or Schedule(),
                view=self._view,
            )
            try:
                ending = launch.watch(self._nodes[1], self._timeout_s, self._exit_grace_s)
            except KeyboardInterrupt:
                launch.stop_all()
                launch.report("interrupted", 130, "Interrupted.").write()
                raise
            launch.stop_all()
            if left := processes.remaining():
                raise RuntimeError(f"Processes of the run outlived it: {left}")
        report = launch.report(ending.outcome, ending.exit_code, ending.message)
        report.write()
        return report


def new_run_dir(parent: Path = Path("runs")) -> Path:
    """Return a new name for a run's folder; nothing is made."""
    return parent / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _prepare(run_dir: Path) -> Paths:
    """Make the run's folder.

    Raises:
        UsageError: it holds a run already, or cannot be made.
    """
    paths = Paths.of(run_dir.absolute())
    if paths.events.exists():
        raise UsageError(
            f"The folder {run_dir} holds a run already. Give another one with --run-dir, or delete it first."
        )
    try:
        for folder in (paths.events, paths.logs, paths.samples, paths.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The run's folder {run_dir} cannot be made: {error}. Give another one with --run-dir."
        ) from error
    return paths
