"""The components that the parts of a session share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from azureml_elastic.checkpoint.load.selection import EarlierCheckpoint
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.config import BatchPolicy, CheckpointPolicy, FixedGlobalBatch
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.profiling import Profiling

__all__ = ["SessionContext"]


@dataclass(frozen=True)
class SessionContext:
    """Components of a session.

    ``can_grow`` is whether the run may have more than one rank later; ``nodes_per_replica`` is how many nodes hold one
    copy of a sharded model; ``earlier`` is where a run that continues another one starts.
    """

    identity: WorkerIdentity  # of round 0 in a process that waits for its assignment to one
    agent: Agent
    storage: Storage
    checkpoint: CheckpointPolicy
    batch: BatchPolicy = field(default_factory=FixedGlobalBatch)
    audit: Audit = field(default_factory=lambda: Audit(None))
    profiling: Profiling | None = None
    can_grow: bool = False
    nodes_per_replica: int | Literal["all"] = 1
    earlier: EarlierCheckpoint | None = None
