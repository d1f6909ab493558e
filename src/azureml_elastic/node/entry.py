"""Puts a node together: identity, table, rendezvous, channel, agent; and takes it apart again."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_elastic.errors import MissingExtra, RunFailed, RunSucceeded
from azureml_elastic.ledger.events import NodeLeft, NodeStarted
from azureml_elastic.node.channel import Channel
from azureml_elastic.node.identity import NodeIdentity
from azureml_elastic.node.preemption import Preemption
from azureml_elastic.node.recorder import Recorder
from azureml_elastic.node.rendezvous.handler import Rendezvous
from azureml_elastic.node.rendezvous.round import Limits
from azureml_elastic.node.table import Table, open_table
from azureml_elastic.spec import environment as variables
from azureml_elastic.spec.command import Program, require_script

if TYPE_CHECKING:
    from azureml_elastic.node.agent import NodeAgent

__all__ = ["run_node"]

_LOG = logging.getLogger(__name__)


def run_node(identity: NodeIdentity, program: Program) -> int:
    """Run one node until the run ends or the node must leave.

    Args:
        identity: of the node.
        program: the user's training program.

    Returns:
        The exit code, see :mod:`azureml_elastic.node.__main__`.

    Raises:
        UsageError: the table, the program or the installation is not usable.
    """
    require_script(program)
    plan = identity.plan
    table = open_table(plan.distribution.rendezvous, identity.run_id, os.environ)
    slots = _slots(plan.distribution.process_count_per_instance)
    noticed: list[Preemption] = []
    rendezvous = Rendezvous(
        table=table,
        node=identity.node,
        host=identity.host,
        slots=slots,
        limits=Limits(plan.resources.min_instance_count, plan.resources.max_instance_count),
        timings=plan.distribution.rendezvous.timings,
        cancelled=lambda: bool(noticed) and noticed[0].noticed,
    )
    preemption = Preemption(plan.distribution.preemption_grace, rendezvous.wake.set)
    noticed.append(preemption)
    preemption.listen()
    rendezvous.announce()
    recorder = Recorder(identity.folder, identity.node, rendezvous.incarnation, table)
    recorder.record(NodeStarted, 0, host=identity.host, pid=os.getpid())
    channel = Channel(recorder, rendezvous.wake.set)
    # torch's launcher would turn SIGTERM into an exception wherever the agent is at that moment.
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")
    os.environ[variables.RUN_DIR] = str(identity.folder)
    os.environ[variables.PLAN] = plan.to_json()
    exit_code, reason = 1, "an error of the agent"
    try:
        agent = _agent(identity, program, slots, rendezvous, channel, recorder, table, preemption)
        exit_code, reason = _run(agent, rendezvous, preemption)
    finally:
        number = rendezvous.last_round
        recorder.record(NodeLeft, number, reason=reason, exit_code=exit_code)
        channel.close()
        rendezvous.shutdown()
        recorder.close()
        table.close()
    return exit_code


def _run(agent: NodeAgent, rendezvous: Rendezvous, preemption: Preemption) -> tuple[int, str]:
    """Return the exit code and why the node ends."""
    from azureml_elastic.node.agent import Ending

    try:
        ending = agent.take_part()
    except RunSucceeded as end:
        return 0, str(end)
    except RunFailed as end:
        print(f"error: {end}", file=sys.stderr)
        return end.exit_code, str(end)
    except InterruptedError:
        ending = Ending.LEFT
    if ending is Ending.SUCCEEDED:
        return 0, "the run ended well"
    if ending is Ending.FAILED:
        assert agent.failure is not None
        print(f"error: {agent.failure.message}", file=sys.stderr)
        return agent.failure.exit_code, agent.failure.message
    reason = f"preempted ({preemption.reason})"
    rendezvous.leave(reason)
    return preemption.exit_code, reason


def _agent(
    identity: NodeIdentity,
    program: Program,
    slots: int,
    rendezvous: Rendezvous,
    channel: Channel,
    recorder: Recorder,
    table: Table,
    preemption: Preemption,
) -> NodeAgent:
    try:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    except ImportError as error:
        raise MissingExtra("torch", "node") from error
    from azureml_elastic.node.agent import NodeAgent
    from azureml_elastic.node.torchrun import TableRendezvousHandler

    distribution = identity.plan.distribution
    logs = identity.folder / "workers" / identity.node
    logs.mkdir(parents=True, exist_ok=True)
    entrypoint, arguments = _worker_command(program)
    return NodeAgent(
        WorkerSpec(
            role="worker",
            local_world_size=slots,
            entrypoint=entrypoint,
            args=arguments,
            rdzv_handler=TableRendezvousHandler(rendezvous, identity.run_id),
            max_restarts=distribution.max_restarts,
            monitor_interval=distribution.monitor_interval.total_seconds(),
        ),
        DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL, tee=Std.ALL),
        rendezvous=rendezvous,
        channel=channel,
        recorder=recorder,
        table=table,
        plan=identity.plan,
        preemption=preemption,
        opens_session=_opens_session(program),
    )


def _opens_session(program: Program) -> bool:
    """Tell by its text whether a script uses this library; of a module that is not found here, assume it."""
    path = Path(program.target) if program.kind == "script" else Path(*program.target.split(".")).with_suffix(".py")
    try:
        return b"azureml_elastic" in path.read_bytes()
    except OSError:
        return True


def _worker_command(program: Program) -> tuple[str, tuple[str, ...]]:
    """Return the executable and its arguments: this interpreter, unless the user named another by path."""
    interpreter = program.interpreter if program.interpreter and os.sep in program.interpreter else sys.executable
    options = program.interpreter_options
    target = ("-m", program.target) if program.kind == "module" else (program.target,)
    return interpreter, (*(() if "-u" in options else ("-u",)), *options, *target, *program.arguments)


def _slots(count: int | str) -> int:
    """Return the workers of this node: as told, or one per GPU."""
    if isinstance(count, int):
        return count
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "node")
    return _gpus() or 1


def _gpus() -> int:
    """Count GPUs without importing torch, whose import may take seconds, where the driver's own list can be read."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
