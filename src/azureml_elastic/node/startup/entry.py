"""Puts a node together: identity, table, rendezvous, channel, workers, agent; and takes it apart again."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory, LocalSnapshots
from azureml_elastic.config import ElasticDistribution, Plan
from azureml_elastic.config.exit_codes import UNHEALTHY
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.environment.process import change, set_defaults
from azureml_elastic.errors import ElasticError, MissingExtra, NodeLeaving, RunFailed, RunSucceeded
from azureml_elastic.forks.client import PreloadServer
from azureml_elastic.ipc import Connection
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.ledger.events import HealthChecked, NodeLeft, NodeStarted
from azureml_elastic.node.agent.agent import NodeAgent
from azureml_elastic.node.agent.agent_table import AgentTable
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.earlier_run import with_earlier_checkpoint
from azureml_elastic.node.agent.event_logs import ObservationLog
from azureml_elastic.node.agent.port import AgentPort, HangWatch
from azureml_elastic.node.agent.shard_transfer import ShardReceiver, ShardSender
from azureml_elastic.node.agent.without_session import NewcomerWatch, SessionWatch
from azureml_elastic.node.agent.worker_group import WorkerGroup, inherited_variables, withheld_variables
from azureml_elastic.node.agent.worker_processes import Workers
from azureml_elastic.node.core.hangs import HangPolicy
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.core.training import State
from azureml_elastic.node.diagnostics.admission import Admission
from azureml_elastic.node.diagnostics.checks.accelerator import count_visible_devices
from azureml_elastic.node.diagnostics.findings import DiagnosticReport
from azureml_elastic.node.diagnostics.node_checks import check_folders, node_checks
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.failures.host_strikes import HostStrikes
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.hangs.stack_dump import StackReporter
from azureml_elastic.node.host.identity import NodeIdentity, new_incarnation
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.publishing.publisher import open_publishing
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.rendezvous.context import LocalNode, Surroundings
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.replacement.on_node import start_replacement_thread
from azureml_elastic.node.startup.preload import begin_preload
from azureml_elastic.node.table import Table, open_table
from azureml_elastic.node.table.opening import connection_string_variable
from azureml_elastic.node.table.server_time import ServerClock
from azureml_elastic.program.command import Program, require_script
from azureml_elastic.program.source import opens_session, program_modules

_LOG = logging.getLogger(__name__)

_LEAVE_SECONDS = 2.0
"""How long a node that leaves waits for its row to be written."""

_NO_SESSION_STAYS = (
    'recovery="in_process" keeps no process of %s, which opens no session of its own: each change of the nodes starts '
    "its workers again. A training stack continues with the state in memory all the same. To keep the processes, open "
    "a session with train.start()."
)


def run_node(
    identity: NodeIdentity,
    program: Program,
    environment: NodeEnvironment,
    early_preload: PreloadServer | None = None,
    start_preload: Callable[..., PreloadServer] = PreloadServer,
    *,
    again: bool = False,
) -> int:
    """Run one node until the run ends or the node must leave.

    Where an unexpected error keeps it from its first round, it begins once more: the others may wait for it.

    Args:
        early_preload: preload server that was started before the plan was read, closed by the caller.
        start_preload: function that starts the preload server, with the arguments of :class:`PreloadServer`.
        again: whether it has begun before.

    Returns:
        The exit code, see :mod:`azureml_elastic.node.__main__`.

    Raises:
        UsageError: the table, the program or the installation is not usable.
    """
    require_script(program)
    with contextlib.ExitStack() as stack:
        node = None
        try:
            node = _Node(identity, program, environment, stack, early_preload, start_preload)
            return node.run()
        except ElasticError:
            raise
        except Exception:
            if again or (node is not None and node.has_trained):
                raise
            _LOG.exception("An unexpected error keeps this node from its first round. It begins once more.")
    fresh = dataclasses.replace(identity, incarnation=new_incarnation())
    return run_node(fresh, program, environment, None, start_preload, again=True)


class _Node(Surroundings):
    """The parts of one node, made in the order in which time is best used: whatever is slow begins early.

    Each part gets only parts that were made before it.

    Args:
        stack: takes the node apart at its end; the other arguments are those of :func:`run_node`.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        program: Program,
        environment: NodeEnvironment,
        stack: contextlib.ExitStack,
        early_preload: PreloadServer | None,
        start_preload: Callable[..., PreloadServer],
    ) -> None:
        plan = identity.plan
        distribution = plan.distribution
        self._job = environment.job or ""
        if distribution.runs_engine:
            program = _engine_program(program, distribution)
        self._program = program
        timings = plan.rendezvous.timings
        self._slots = 1 if distribution.runs_engine else _slots(distribution.process_count_per_instance, environment)
        # One for all that the agent's thread waits for: notices, hubs, workers' messages, the round's store.
        queue = EventQueue()
        self._preemption = preemption = PreemptionWatcher(plan.preemption, queue, identity.node)
        stack.callback(preemption.close)
        opened = open_table(plan.rendezvous, identity.run_id, environment)
        self._table = table = AgentTable(opened, preemption)
        stack.callback(table.close)
        self._identity = identity = with_earlier_checkpoint(identity, table, environment)
        self._plan = plan = identity.plan
        clock = ServerClock(table, identity.node)
        self._strikes = strikes = HostStrikes(table, identity.host_id, identity.node, clock)
        stack.callback(strikes.close)
        preemption.listen()
        preemption.watch()
        publishing = open_publishing(identity, environment)
        stack.callback(publishing.close)
        self._recorder = recorder = Recorder(
            identity.folder, identity.node, identity.incarnation, table, publishing.put
        )
        stack.callback(recorder.close)
        memory = AgentMemory(_local_snapshots(identity))
        self._receiver = receiver = ShardReceiver(memory)
        stack.callback(receiver.close)
        self._rendezvous = rendezvous = Rendezvous(
            table=table,
            node=LocalNode(
                identity.node,
                identity.host,
                self._slots,
                host_id=identity.host_id,
                incarnation=identity.incarnation,
                ports=plan.rendezvous.port_range,
                probes_other_ports=not distribution.listens_in_range,
                program=plan.program,
            ),
            limits=_limits(plan),
            timings=timings,
            surroundings=self,
            queue=queue,
        )
        stack.callback(rendezvous.shutdown)
        with contextlib.suppress(NodeLeaving):  # there is a notice already, for which run() ends this node
            rendezvous.announce()
        # After the row, for which the others wait.
        self._record_start()
        self._watch = HangDetector(HangPolicy.of(plan))
        sender = ShardSender(memory, rendezvous.authenticator)
        self._channel = Channel(recorder, queue, self._watch, memory, sender)
        stack.callback(self._channel.close)
        self._newcomers = NewcomerWatch(self._channel.folder, distribution.newcomer_timeout, rendezvous.clock)
        # Before the preload server, which hands this to its workers, and before threads that read the environment.
        environment = self._set_inherited_variables(opened, environment)
        self._preload_server: PreloadServer | None = None
        if distribution.preload_workers:
            self._preload_server = begin_preload(early_preload, program, environment.variables, start_preload)
            stack.callback(self._preload_server.close)
        self._replacement = start_replacement_thread(identity, table, self._leads, environment)
        if self._replacement is not None:
            stack.callback(self._replacement.close)
        checks = node_checks(
            plan.health,
            node=identity.node,
            owner=identity.owner,
            folders=check_folders(identity.folder, plan.checkpoint.path),
            gpus=count_visible_devices(environment),
            table=table,
            clock=clock,
            table_heartbeat_interval=timings.table_heartbeat_interval,
            hub=(identity.host, rendezvous.hub.port),
            strikes=strikes,
        )
        self._admission = Admission(
            plan.health,
            checks,
            table,
            strikes,
            identity.incarnation,
            self,
            stay=plan.resources.effective_placement == "gang" and plan.resources.max_instance_count > 1,
        )

    @property
    def has_trained(self) -> bool:
        """Whether the node has been in a round."""
        return self._rendezvous.machine.last_round > 0

    def run(self) -> int:
        """Take part in the run and return the exit code."""
        exit_code, reason = 1, "an error of the agent"
        try:
            exit_code, reason = self._take_part(self._agent())
            self._channel.ended_well = exit_code == 0
        finally:
            number = self._rendezvous.machine.last_round
            self._recorder.record(NodeLeft, number, reason=reason, exit_code=exit_code)
        return exit_code

    def _take_part(self, agent: NodeAgent) -> tuple[int, str]:
        """Return the exit code and why the node ends."""
        try:
            if not self.must_leave() and not self._admission.wait():
                return UNHEALTHY, self._admission.report.lines("fail")[0]
            ending = State.LEFT if self.must_leave() else agent.take_part()
        except RunSucceeded as end:
            return 0, str(end)
        except RunFailed as end:
            _tell(str(end))
            return end.exit_code, str(end)
        except NodeLeaving:
            ending = State.LEFT
        if ending is not State.LEFT and self._replacement is not None:
            self._replacement.finish()
        if ending is State.SUCCEEDED:
            return 0, "the run ended well"
        if ending is State.FAILED:
            assert agent.machine.closed is not None
            _tell(agent.machine.closed.message)
            return agent.machine.closed.exit_code, agent.machine.closed.message
        reason = f"preempted ({self._preemption.reason})"
        # While the table is away the call takes longer than a notice, and the others notice the loss by themselves.
        leaving = threading.Thread(target=self._rendezvous.leave, args=(reason,), name="leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        return self._preemption.exit_code, reason

    def must_leave(self) -> bool:
        """Return whether there is a notice, which is final from then on."""
        return self._preemption.commit_to_leave()

    def live_strikes(self, *, fresh: bool) -> int:
        """Return the number of live strikes against this machine."""
        return self._strikes.mine(fresh=fresh)

    def record(self, kind: type[Any], number: int, **fields: Any) -> None:
        """Record an event in the ledger."""
        self._recorder.record(kind, number, **fields)

    def receive_shard(self, connection: Connection, shard: ShardDescription) -> None:
        """Receive a snapshot shard of another node into this one's memory."""
        self._receiver.receive(connection, shard)

    def progress(self) -> dict[str, int | str | None]:
        """Return the step that training has reached, the number of steps of the run, and what new nodes wait for."""
        workers = self._channel.workers
        return {"step": workers.step or None, "steps": workers.expected, "waits": self._newcomers.waits or None}

    def _leads(self) -> bool:
        """Return whether it is this node that looks after what concerns the whole run."""
        return self._rendezvous.machine.leads or self._rendezvous.hub.should_seal()

    def _agent(self) -> NodeAgent:
        _require_torch()
        distribution = self._plan.distribution
        identity, rendezvous, channel, preemption = self._identity, self._rendezvous, self._channel, self._preemption
        opens = self._opens_session
        stays = distribution.keeps_processes(opens_session=opens)
        if distribution.recovery == "in_process" and not stays:
            _LOG.warning(_NO_SESSION_STAYS, self._program.target)
        workers = Workers(
            self._program,
            identity.folder / "workers" / identity.node,
            channel,
            self._preload_server,
            handover_seconds=distribution.handover_timeout.total_seconds(),
            stop_seconds=distribution.stop_timeout.total_seconds(),
        )
        group = WorkerGroup(workers, channel, self._slots, identity.node, stays=stays)
        hangs = HangWatch(
            self._watch, StackReporter(channel.folder, identity.folder / "stacks", identity.node, rendezvous.queue)
        )
        record, machine = self._recorder.record, rendezvous.machine
        session = SessionWatch(channel.folder, lambda kind: record(kind, machine.last_round), rendezvous.clock)
        rendezvous.machine.run_workers(self._plan, opens_session=opens)
        port = AgentPort(
            identity,
            rendezvous,
            group,
            channel,
            preemption,
            hangs,
            self._newcomers,
            session,
            self._recorder,
            self._strikes,
            ObservationLog(self._recorder),
            self._table,
        )
        return NodeAgent(rendezvous.machine, port, group, channel, preemption)

    def _set_inherited_variables(self, opened: Table, environment: NodeEnvironment) -> NodeEnvironment:
        """Set in this process what its workers inherit, without the table's secret; return the environment since.

        Whatever else this process starts inherits the same, and MLflow's clients in its threads read it.
        """
        plan, program = self._plan, self._program
        self._opens_session = not plan.distribution.runs_engine and opens_session(program_modules(program))
        secret = connection_string_variable(opened, plan.rendezvous)
        withheld = dict.fromkeys(withheld_variables(secret, plan.checkpoint.path))
        change({**inherited_variables(self._identity, self._channel.path, environment), **withheld})
        if plan.distribution.runs_engine or (program.kind == "script" and self._opens_session):
            set_defaults({variables.INTEGRATIONS: "off"})  # the script has a session of its own, or needs none
        return NodeEnvironment.read()

    def _record_start(self) -> None:
        job, began = self._job, psutil.Process().create_time()
        self._recorder.record(NodeStarted, 0, host=self._identity.host, pid=os.getpid(), job=job, began=began)

    def record_health(self, report: DiagnosticReport) -> None:
        """Record a report of health checks in the ledger."""
        problems = report.lines("warn", "fail")
        self._recorder.record(HealthChecked, 0, status=report.status, seconds=report.seconds, problems=problems)

    def stay_away(self, reason: str) -> None:
        """Write that this node does not join now."""
        self._rendezvous.leave(reason)

    def pause(self, seconds: float) -> None:
        """Wait before another health check.

        Raises:
            NodeLeaving: this node must leave.
        """
        self._rendezvous.wait(seconds)


def _engine_program(program: Program, distribution: ElasticDistribution) -> Program:
    """Return the program that runs an engine on this node, and with it the user's program."""
    count = distribution.process_count_per_instance
    arguments = (distribution.framework, "--workers", str(count), "--", *program.command)
    return Program(None, (), "module", "azureml_elastic.engines", arguments, program.placeholders)


def _tell(failure: str) -> None:
    """Print why the run failed: a traceback begins on a line of its own, as the program printed it."""
    separator = "\n" if "\n" in failure else " "
    print(f"error:{separator}{failure}", file=sys.stderr)


def _limits(plan: Plan) -> Limits:
    """Return the limits of a round's members."""
    distribution, resources = plan.distribution, plan.resources
    least, most = distribution.node_limits(resources.min_instance_count, resources.max_instance_count)
    size = distribution.nodes_per_replica
    return Limits(least, most, plan.health.quarantine_strikes, 1 if size == "all" else size)


def _slots(count: int | str, environment: NodeEnvironment) -> int:
    """Return the number of workers of this node: as configured, or one per GPU."""
    if isinstance(count, int):
        return count
    _require_torch()
    return count_visible_devices(environment) or 1


def _require_torch() -> None:
    """Check that torch is installed, without its import, which is the workers'.

    Raises:
        MissingExtra: it is not.
    """
    if find_spec("torch") is None:
        raise MissingExtra("torch", "node")


def _local_snapshots(identity: NodeIdentity) -> LocalSnapshots | None:
    where = identity.plan.checkpoint.snapshot_path
    if where is None:
        return None
    try:
        return LocalSnapshots(Path(where) / quote(identity.run_id, safe=""), identity.node)
    except OSError as error:
        _LOG.warning("%s on this node's disk cannot be used, copies stay in memory alone: %s", where, error)
        return None
