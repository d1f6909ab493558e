"""The one document that crosses from the submission to the nodes."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, ValidationError

from azureml_elastic.config.base import ConfigModel
from azureml_elastic.config.batch import BatchPolicy, FixedGlobalBatch
from azureml_elastic.config.checkpoint import CheckpointPolicy
from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.config.profile import Profile
from azureml_elastic.config.replacement import ReplacementPolicy
from azureml_elastic.config.resources import ElasticResources, NodePool
from azureml_elastic.errors import PlanError

__all__ = ["PLAN_VERSION", "Plan"]

PLAN_VERSION = 1


class Plan(ConfigModel):
    """Everything that a node must know, and nothing secret.

    Args:
        version: of this document; a node refuses one that it does not know.
        resources: the node counts.
        distribution: the processes.
        checkpoint: the checkpoints.
        batch: what becomes of it when the world size changes.
        pools: the computes in the order of preference; none where all nodes have one compute.
        replacement: how lost nodes are replaced; ``None`` for not at all.
        run_id: names the run in the table; ``None`` takes the id that Azure ML gave the run, which every
            submission gets anew.
        audit: whether workers write down the samples of each step, so that "exactly once" can be proven.
        profile: the steps and ranks that PyTorch's profiler records; ``None`` for none.
    """

    version: Literal[1] = Field(default=1)
    resources: ElasticResources
    distribution: ElasticDistribution = ElasticDistribution()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    batch: BatchPolicy = FixedGlobalBatch()
    pools: tuple[NodePool, ...] = ()
    replacement: ReplacementPolicy | None = None
    run_id: str | None = None
    audit: bool = False
    profile: Profile | None = None

    def to_json(self) -> str:
        """Return the document, one line, keys in order: the same plan gives the same text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a document.

        Args:
            text: what :meth:`to_json` returned.

        Raises:
            PlanError: the text is no JSON object, is of an unknown version, or has wrong fields.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise PlanError(f"The plan is not JSON ({error}). Submit the job again with this release.") from error
        if not isinstance(document, dict):
            raise PlanError(f"The plan is a JSON {type(document).__name__}, not an object. Submit the job again.")
        version = document.get("version")
        if version != PLAN_VERSION:
            raise PlanError(
                f"The plan has version {version!r}; this release of azureml-elastic reads version {PLAN_VERSION}. "
                "Install the release on the nodes that submitted the job, or submit it again."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise PlanError(f"The plan has wrong fields: {error}") from error
