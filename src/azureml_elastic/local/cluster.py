"""A cluster on one machine: each node is a process tree that runs the production agent, and faults are injected."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from azureml_elastic.checkpoint.format.catalogue import furthest, newest_committed
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import (
    BatchPolicy,
    CheckpointPolicy,
    ElasticDistribution,
    ElasticResources,
    FixedGlobalBatch,
    HealthPolicy,
    MetricsPolicy,
    Plan,
    PreemptionPolicy,
    TableRendezvous,
)
from azureml_elastic.config.base import positive_duration
from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.config.plan import EarlierRun
from azureml_elastic.environment.names import AZURE_STORAGE_CONNECTION_STRING as CONNECTION_STRING
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import CommandError, ElasticError, TableError, TableForbidden, TableNotFound, UsageError
from azureml_elastic.free_space import free_bytes, is_full
from azureml_elastic.ledger.summary import Paths, Report, load_report
from azureml_elastic.local.azurite import SQLITE_TABLE, TableChoice, check_table, open_table_choice
from azureml_elastic.local.faults.model import Schedule
from azureml_elastic.local.fork_start import are_forked, open_fork_start
from azureml_elastic.local.launch import Launch
from azureml_elastic.local.node_start import NODE_COMMAND, NodeStart, StartMethod
from azureml_elastic.local.processes import NodeProcesses
from azureml_elastic.local.run_end import StopSignals
from azureml_elastic.local.view import UntilBroken, View
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY
from azureml_elastic.node.table.sqlite import SqliteTable
from azureml_elastic.private_folder import make_private
from azureml_elastic.program.command import Program, parse_program
from azureml_elastic.program.fixed_ranks import describe_fixed_ranks
from azureml_elastic.program.source import opens_session, program_modules
from azureml_elastic.program.worker_variables import refuse_changing, words_with_placeholders

_LOG = logging.getLogger(__name__)


def find_earlier_run(folder: Path) -> EarlierRun:
    """Return the run of a folder, to be continued.

    Raises:
        UsageError: the folder is not a run folder, or has no committed checkpoint.
    """
    report, path = load_report(folder.absolute()), Paths.of(folder.absolute()).checkpoints
    if report.run_id and (path / report.run_id).is_dir():  # as the nodes of a job have made it
        path /= report.run_id
    try:
        storage = open_storage(path)
        reference = furthest(storage, _pointer(folder / SQLITE_TABLE, report.run_id) or newest_committed(storage))
    except OSError as error:
        raise UsageError(f"The checkpoints of the run {folder} cannot be read: {error}") from error
    if reference is None:
        raise UsageError(
            f"The run {folder} has no committed checkpoint in {path}, so there is nothing to continue from. Start the "
            "program without --resume-from, or give another run."
        )
    return EarlierRun(name=report.run_id or report.name, path=str(path), checkpoint=reference.to_json())


def _pointer(table: Path, run_id: str) -> Reference | None:
    """Return the committed checkpoint that the run's table file names; ``None`` if the table was another one."""
    if not table.is_file() or not run_id:
        return None
    try:
        with contextlib.closing(SqliteTable(table, TableRendezvous().table, run_id)) as rows:
            row = rows.get(CHECKPOINT_KEY)
    except (TableError, TableNotFound, TableForbidden):  # the folder may be read-only
        return None
    pointer = None if row is None else row.value["pointer"]
    return None if pointer is None else Reference.from_json(pointer)


def continued_runs(folder: Path | None) -> tuple[Path, ...]:
    """Return the folders of a run and of those that it has continued, the first run first."""
    found: list[Path] = []
    while folder is not None:
        found.insert(0, folder.absolute())
        folder = load_report(folder).resumed_from
    return tuple(found)


_MIB = 1 << 20
_REPORT_BYTES = 1 << 18
"""Space that is taken for the report when the run begins: a disk that fills up must not hide why the run has ended."""


def new_run_dir() -> Path:
    """Return an unused name for a run folder, without creating it."""
    return Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def prepare_run_dir(run_dir: Path) -> Paths:
    """Create the folder of a run and return its paths.

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
            make_private(folder)
        paths.report_part.touch(0o600)
        paths.report_part.write_bytes(bytes(_REPORT_BYTES))
    except OSError as error:
        raise UsageError(
            f"The run folder {run_dir} cannot be created: {error}. Choose another one with --run-dir."
        ) from error
    return paths


def require_space(run_dir: Path, disk_mib: int | None) -> None:
    """Check that the nodes of a run will not wait for space as soon as they start.

    Args:
        run_dir: folder of the run, which need not exist.
        disk_mib: free MiB that the nodes' health check requires, ``None`` for any.

    Raises:
        UsageError: less is free.
    """
    for what, option, folder in (
        ("run folder", "another one with --run-dir", run_dir),
        ("folder for temporary files", "another one with TMPDIR", Path(tempfile.gettempdir())),
    ):
        free = free_bytes(folder)
        if free is not None and free // _MIB < (disk_mib or 0):
            raise UsageError(
                f"The disk of the {what} {folder} has {free // _MIB:,} MiB free, and each node requires {disk_mib:,} "
                f"MiB (HealthPolicy.disk_mib). Free space on it, or choose {option}."
            )


_CHECKPOINT_EVERY = timedelta(seconds=10)
"""Local runs are shorter than a job's default checkpoint interval."""


@dataclass(frozen=True)
class LocalCluster:
    """Run a program on local nodes, each a process tree of this machine.

    Args:
        nodes: minimum number of nodes that train, and number of nodes that are started (the maximum that train).
        chaos: schedule of faults to inject.
        run_dir: new folder for the run's files; ``None`` creates one below ``./runs``.
        table: ``sqlite``, ``azurite`` or the table URL of a storage account. Table faults require a table that is
            reached over plain HTTP, such as the emulator.
        checkpoint: checkpoint policy, whose path is in the run's folder; by time every 10 seconds unless it is given.
        audit: whether workers record the samples of each step, so that the report can prove that each was seen once.
        batch: batch policy.
        preemption: preemption policy, without the machine's scheduled events, which are not those of local nodes.
        health: health policy.
        rendezvous: ports, address and timings; ``table`` chooses the table.
        metrics: where the run's metrics are published.
        resume_from: folder of an earlier run, from whose last committed checkpoint this run starts.
        distribution: configuration of the processes; ``"auto"`` is one worker per node, as the nodes share the
            machine's GPUs.
        timeout: time after which the run is stopped and counted as failed.
        exit_grace: time that the other nodes have to exit after the run has ended, and all after a signal.
        view: view that shows the run; by default none is shown.
        node_command: command that starts a node; ``--`` and the program are appended.
        start: ``fork`` forks several nodes from one process that has made the program's imports once, where that is
            possible (see docs/how-to/local.md); ``command`` starts each by its command, as on a machine of its own. Or
            what else starts them.

    Raises:
        UsageError: a time limit is no positive duration.
    """

    nodes: tuple[int, int] = (1, 3)
    _: KW_ONLY
    chaos: Schedule | None = None
    run_dir: Path | None = None
    table: str = "sqlite"
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    audit: bool = False
    batch: BatchPolicy = field(default_factory=FixedGlobalBatch)
    preemption: PreemptionPolicy = field(default_factory=PreemptionPolicy)
    health: HealthPolicy = field(default_factory=HealthPolicy)
    rendezvous: TableRendezvous = field(default_factory=TableRendezvous)
    metrics: MetricsPolicy = field(default_factory=MetricsPolicy)
    resume_from: Path | None = None
    distribution: ElasticDistribution = field(default_factory=ElasticDistribution)
    timeout: timedelta | float | str | None = None
    exit_grace: timedelta | float | str = 20.0
    view: View = field(default_factory=View)
    node_command: Sequence[str] = NODE_COMMAND
    start: StartMethod | NodeStart = "fork"

    def __post_init__(self) -> None:
        if self.timeout is not None:
            positive_duration("timeout", self.timeout)
        positive_duration("exit_grace", self.exit_grace)

    def run(self, argv: Sequence[str]) -> Report:
        """Run a program to its end and write ``report.json``; no process is left running afterwards.

        Args:
            argv: program and its arguments. ``$RANK`` and the other variables of a worker in its arguments have the
                values of each worker, as in a submitted job.

        SIGINT, SIGTERM and SIGHUP stop the nodes as a preemption does; a second one kills them. In both cases the
        report is written first, then ``KeyboardInterrupt`` or ``SystemExit`` is raised.

        Raises:
            UsageError: the run folder is already used, the table is not recognised, the faults do not apply to it, or
                the earlier run has no committed checkpoint.
            CommandError: an argument has a variable of a worker that cannot be replaced.
        """
        words = _node_words(argv, self.distribution)
        check_table(self.table, self.chaos)  # before a folder is made
        if self.resume_from is not None:
            find_earlier_run(self.resume_from)
        with StopSignals() as signals:
            folder = self.run_dir or new_run_dir()
            require_space(folder, self.health.disk_mib)
            paths = prepare_run_dir(folder)
            try:
                report = self._run(argv, words, paths, signals)
            except (KeyboardInterrupt, SystemExit) as error:
                # A signal that comes before hold() raises, and no launch is there that writes the report.
                if not paths.report.exists():
                    (
                        Report(
                            name=paths.run_dir.name,
                            paths=paths,
                            outcome="interrupted",
                            exit_code=_exit_code(error),
                            message="The run was interrupted before its nodes were started.",
                        )
                    ).write()
                raise
            signals.raise_received()
        return report

    def _run(self, argv: Sequence[str], words: Sequence[str], paths: Paths, signals: StopSignals) -> Report:
        with contextlib.ExitStack() as stack:
            starting = stack.enter_context(self._open_start(words))  # it imports while the table is opened
            table = stack.enter_context(open_table_choice(self.table, paths, self.chaos))
            # From here on there are processes: an exception at any line could cut off their end or the report. The loop
            # of the launch looks for signals instead.
            signals.hold()
            processes = stack.enter_context(NodeProcesses(paths.logs, starting))
            launch = Launch(
                plan=self.plan(table, paths),
                table=table,
                paths=paths,
                command=(*self.node_command, *words),
                processes=processes,
                schedule=self.chaos or Schedule(),
                opens_session=self._opens_session(argv),  # what it warns of is written before the view
                view=stack.enter_context(UntilBroken(self.view)),
                signals=signals,
                continued=continued_runs(self.resume_from),
            )
            try:
                end = launch.watch(
                    self.nodes[1],
                    None if self.timeout is None else positive_duration("timeout", self.timeout).total_seconds(),
                    positive_duration("exit_grace", self.exit_grace).total_seconds(),
                )
            except BaseException as error:
                launch.stop_all()
                launch.report("interrupted", _exit_code(error), f"The launcher was ended by {error!r}.").write()
                raise
            launch.stop_all()
            message = end.message
            if end.exit_code and is_full(paths.run_dir):
                message = f"{message} The disk of the run folder {paths.run_dir} is full."
            report = launch.report(end.outcome, end.exit_code, message)
            try:
                report.write()
            except OSError as error:
                raise ElasticError(
                    f"The run has {end.outcome}, but its report {paths.report} could not be written: {error}. {message}"
                ) from error
            if left := processes.remaining():
                raise RuntimeError(f"Processes of the run outlived it: {left}")
        return report

    def _open_start(self, words: Sequence[str]) -> contextlib.AbstractContextManager[NodeStart]:
        """Return the context of what starts the nodes, whose agents have these arguments."""
        if not isinstance(self.start, str):
            return contextlib.nullcontext(self.start)
        forks = self.start == "fork" and tuple(self.node_command) == NODE_COMMAND
        program = _parse(words[words.index("--") + 1 :]) if forks else None
        if program is None or not are_forked(program, self.distribution, self.nodes[1]):
            return contextlib.nullcontext(NodeStart())
        # Forks show in /proc the environment that the server was started with: not the table's secret to workers.
        return open_fork_start(
            program,
            {name: value for name, value in UserEnvironment.read().for_nodes().items() if name != CONNECTION_STRING},
        )

    def _opens_session(self, argv: Sequence[str]) -> bool:
        """Return whether a program uses this library, and warn where it has ranks or an address of its own."""
        program = None if self.distribution.runs_engine else _parse(argv)
        if program is None:
            return False
        modules = list(program_modules(program))
        if fixed := describe_fixed_ranks(modules):
            _LOG.warning("%s", fixed)
        return opens_session(modules)

    def plan(self, table: TableChoice, paths: Paths) -> Plan:
        """Return the plan that the nodes receive."""
        minimum, maximum = self.nodes
        # A round without survivors is given up after two missing heartbeats. A local run is too short for a job's 5 s.
        timings = self.rendezvous.timings.model_copy(update={"table_heartbeat_interval": timedelta(seconds=1)})
        count = self.distribution.process_count_per_instance
        processes = {"process_count_per_instance": 1 if count == "auto" else count}
        place = {"endpoint": table.endpoint, "credential": table.credential, "timings": timings}
        return Plan(
            resources=ElasticResources(min_instance_count=minimum, max_instance_count=maximum),
            distribution=self.distribution.model_copy(update=processes),
            checkpoint=self.checkpoint.model_copy(
                update={
                    "path": str(paths.checkpoints),
                    "every": self.checkpoint.every
                    if "every" in self.checkpoint.model_fields_set
                    else _CHECKPOINT_EVERY,
                }
            ),
            batch=self.batch,
            preemption=self.preemption.model_copy(update={"scheduled_events": None}),
            health=self.health,
            rendezvous=self.rendezvous.model_copy(update=place),
            metrics=self.metrics,
            resume_from=None if self.resume_from is None else find_earlier_run(self.resume_from),
            name=f"local-{secrets.token_hex(4)}",
            audit=self.audit,
        )


def _node_words(argv: Sequence[str], distribution: ElasticDistribution) -> tuple[str, ...]:
    """Return the arguments of a node's agent that start a program with the values of each worker."""
    try:
        parse_program(argv)
    except CommandError:  # a node command of another kind takes other words
        return ("--", *argv)
    words, name, variables = words_with_placeholders(argv)
    refuse_changing(variables, distribution)
    return ("--", *words) if name is None else ("--placeholders", name, "--", *words)


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that this exception ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else FAILED


def _parse(argv: Sequence[str]) -> Program | None:
    """Return the program; ``None`` where a node command of another kind takes other words."""
    try:
        return parse_program(argv)
    except CommandError:
        return None
