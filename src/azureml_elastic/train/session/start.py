"""The entry point of a training process."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakSet

from azureml_elastic.checkpoint.load.selection import EarlierCheckpoint
from azureml_elastic.checkpoint.storage.opening import open_storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import BatchPolicy, CheckpointPolicy, FixedGlobalBatch, Plan, Profile
from azureml_elastic.distributed.process import WorkerSettings, pick_device, trace_folder
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.train.agent_client.channel import ChannelAgent
from azureml_elastic.train.agent_client.stack_dump import register_stack_dump
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.context import SessionContext
from azureml_elastic.train.session.profiling import Profiling
from azureml_elastic.train.session.run import Run
from azureml_elastic.train.session.session import Session

__all__ = ["earlier_checkpoint", "has_run", "open_run", "start"]

_runs: WeakSet[Run] = WeakSet()


def start(
    checkpoint: CheckpointPolicy | None = None,
    *,
    batch: BatchPolicy | None = None,
    profile: Profile | None = None,
    audit: bool | None = None,
) -> Session:
    """Join the run that this process was started for, or start one of a single process.

    Args:
        checkpoint: changes to the job's checkpoint policy: the fields that it was given
        batch: batch and learning rate at changing world sizes, in place of the job's batch policy
        profile: steps and ranks that PyTorch's profiler records, in place of the job's
        audit: whether the samples of each step are recorded, in place of the job's setting

    Returns:
        The session. It ends with a ``with`` block, :meth:`Session.finish`, or the interpreter.

    Raises:
        PlanError: the plan in the environment cannot be read.
        UsageError: the environment is contradictory, or the checkpoint folder is impossible or may not be written to.
        CheckpointError: the checkpoint folder cannot be used for another reason.
        OSError: the node's agent does not answer.
    """
    return Session(open_run(checkpoint, batch=batch, profile=profile, audit=audit))


def open_run(
    checkpoint: CheckpointPolicy | None = None,
    *,
    batch: BatchPolicy | None = None,
    profile: Profile | None = None,
    audit: bool | None = None,
) -> Run:
    """Return the parts of a session; see :func:`start`."""
    environment = WorkerEnvironment.read()
    settings = WorkerSettings.of(environment)
    plan, identity, run_dir = settings.plan, settings.identity, settings.run_dir
    policy = settings.policy(checkpoint)
    assert policy.path is not None
    storage = open_storage(policy.path)
    storage.prepare()
    agent: Agent
    if settings.channel is None:
        agent = StandaloneAgent(storage, identity)
    else:
        register_stack_dump(Path(settings.channel).parent, identity)
        agent = ChannelAgent(settings.channel, identity, stays=settings.stays)
    audited = audit if audit is not None else plan is not None and plan.audit
    profile = profile or (plan.profile if plan is not None else None)
    profiling = None
    if profile:
        folder = trace_folder(profile.folder, run_dir, environment)
        profiling = Profiling(profile, folder, settings.node, pick_device(identity), agent)
    run = Run(
        SessionContext(
            identity,
            agent,
            storage,
            policy,
            batch=batch or (plan.batch if plan else FixedGlobalBatch()),
            audit=Audit(Path(run_dir or ".") if audited else None),
            profiling=profiling,
            can_grow=settings.channel is not None and settings.max_world_size > 1,
            nodes_per_replica=1 if plan is None else plan.distribution.nodes_per_replica,
            earlier=earlier_checkpoint(plan),
        )
    )
    _runs.add(run)
    return run


def earlier_checkpoint(plan: Plan | None) -> EarlierCheckpoint | None:
    """Return the checkpoint of the run that this run continues, as the agent has found it."""
    run = None if plan is None else plan.resume_from
    if run is None or run.path is None or run.checkpoint is None:
        return None
    return EarlierCheckpoint(open_storage(run.path), Reference.from_json(run.checkpoint))


def has_run() -> bool:
    """Return whether this process has a session that is not over."""
    return any(not run.over for run in _runs)
