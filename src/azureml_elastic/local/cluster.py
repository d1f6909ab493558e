"""A cluster on one machine: each node is a process tree that runs the production agent, and faults are injected."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
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
"""Command that starts a node's agent."""


class LocalCluster:
    """Run a program on local nodes, each a process tree of this machine.

    Args:
        nodes: minimum number of nodes that train, and number of nodes that are started (the maximum that train).
        processes_per_node: number of workers per node.
        chaos: schedule of faults to inject.
        run_dir: new folder for the run's files; ``None`` creates one below ``./runs``.
        table: ``sqlite``, ``azurite`` or the table URL of a storage account. Table faults require a table that is
            reached over plain HTTP, such as the emulator.
        checkpoint_steps: steps between two checkpoints; ``None`` for the default interval in time.
        snapshot_steps: steps between two snapshots in memory; ``None`` for no snapshots.
        snapshot_path: folder for the snapshots instead of the nodes' local disks.
        audit: whether workers record the samples of each step, so that the report can prove that each was seen once.
        max_restarts: number of worker failures after which the run fails.
        batch: batch policy at a changing world size.
        distribution: all other settings of the processes; the arguments above take precedence.
        timeout_s: seconds after which the run is stopped and counted as failed.
        exit_grace_s: seconds that the other nodes have to exit after the run has ended.
        view: view that shows the run; ``None`` for no output.
        node_command: command that starts a node; ``--`` and the program are appended.
        popen: function that starts the nodes; it takes arguments of ``subprocess.Popen`` and returns an object of that
            kind.
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
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
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
        self._popen = popen

    def run(self, argv: Sequence[str]) -> Report:
        """Run a program to its end and write ``report.json``; no process is left running afterwards.

        Args:
            argv: program and its arguments.

        Raises:
            UsageError: the run folder is already used, the table is not recognised, or the faults do not apply to it.
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
            processes = stack.enter_context(NodeProcesses(paths.logs, self._popen))
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
    """Return an unused name for a run folder, without creating it."""
    return parent / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _prepare(run_dir: Path) -> Paths:
    """Create the run folder.

    Raises:
        UsageError: the folder already contains a run, or cannot be created.
    """
    paths = Paths.of(run_dir.absolute())
    if paths.events.exists():
        raise UsageError(
            f"The folder {run_dir} already contains a run. Choose another one with --run-dir, or delete it first."
        )
    try:
        for folder in (paths.events, paths.logs, paths.samples, paths.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The run folder {run_dir} cannot be created: {error}. Choose another one with --run-dir."
        ) from error
    return paths
