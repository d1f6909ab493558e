"""How a training process joins its run."""

from __future__ import annotations

from pathlib import Path

from azureml_elastic.checkpoint.storage.opening import open_storage
from azureml_elastic.config import BatchPolicy, CheckpointPolicy, FixedGlobalBatch, Profile
from azureml_elastic.distributed.process import WorkerEnvironment, pick_device, trace_folder
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.train.agent_client.channel import ChannelAgent
from azureml_elastic.train.agent_client.stack_dump import register_stack_dump
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.profiling import Profiling
from azureml_elastic.train.session.session import Session

__all__ = ["start"]


def start(
    checkpoint: CheckpointPolicy | None = None,
    *,
    batch: BatchPolicy | None = None,
    audit: bool | None = None,
    profile: Profile | None = None,
) -> Session:
    """Join the run that this process was started for, or make one of a single process.

    Args:
        checkpoint: when checkpoints are taken and where they go; before the plan's.
        batch: what becomes of batch and learning rate when the world size changes; before the plan's.
        audit: whether to write down the samples of each step; ``None`` does what the plan says.
        profile: the steps and ranks that PyTorch's profiler records; before the plan's.

    Returns:
        The session. It ends by ``with``, by :meth:`Session.finish`, or with the interpreter.

    Raises:
        PlanError: the plan in the environment cannot be read.
        UsageError: the environment contradicts itself.
        OSError: the node's agent does not answer.
    """
    environment = WorkerEnvironment.read()
    policy = environment.policy(checkpoint)
    assert policy.path is not None
    storage = open_storage(policy.path)
    storage.make("")
    identity = environment.identity
    agent: Agent
    if environment.channel is None:
        agent = StandaloneAgent(storage, identity)
    else:
        register_stack_dump(Path(environment.channel).parent, identity)
        agent = ChannelAgent(environment.channel, identity, stays=environment.stays)
    wants_audit = audit if audit is not None else environment.plan is not None and environment.plan.audit
    planned = FixedGlobalBatch() if environment.plan is None else environment.plan.batch
    written = Audit(environment.run_dir) if wants_audit else None
    profile = profile or (None if environment.plan is None else environment.plan.profile)
    profiling = None
    if profile is not None:
        folder = trace_folder(profile.folder, environment.run_dir)
        profiling = Profiling(profile, folder, environment.node, pick_device(identity), agent)
    return Session(identity, policy, storage, agent, written, batch or planned, profiling)
