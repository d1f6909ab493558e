"""The batch, the gradients and the learning rate at a changing world size."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel

__all__ = ["BatchPolicy", "FixedGlobalBatch", "FixedPerWorkerBatch", "Ramp"]


class FixedGlobalBatch(ConfigModel):
    """The samples of an optimizer step are the same at any world size, so training does not depend on it.

    Args:
        logical_workers: number of parts of a step's samples, each with its own forward and backward pass, that are
            divided among the ranks; best with many divisors, such as 12, 24 or 60. ``None`` makes one part per rank.
        reduce: ``"allreduce"`` leaves the sum of gradients to data parallelism, where it differs in its last bits
            between world sizes. ``"exact"`` makes it bit-identical, with memory for the gradients of all logical
            workers of a rank; the model must be the same on all ranks, not sharded.
    """

    kind: Literal["fixed_global"] = "fixed_global"
    logical_workers: int | None = Field(default=None, ge=1)
    reduce: Literal["allreduce", "exact"] = "allreduce"

    @model_validator(mode="after")
    def _exact_needs_parts(self) -> Self:
        if self.reduce == "exact" and self.logical_workers is None:
            raise ValueError(
                'reduce="exact" adds up the gradients of logical workers; give logical_workers, for example 12'
            )
        return self


class Ramp(ConfigModel):
    """A linear rise of the learning rate, during which momentum forgets the noise of smaller batches.

    Args:
        steps: length of the rise; ``"auto"`` is ``0.8 * ratio / (1 - momentum)`` steps for a rise by that ratio.
    """

    kind: Literal["ramp"] = "ramp"
    steps: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _not_negative(self) -> Self:
        if self.steps != "auto" and self.steps < 0:
            raise ValueError(f'steps={self.steps} is below the limit of 0; give a number of steps, or "auto"')
        return self


class FixedPerWorkerBatch(ConfigModel):
    """The samples per rank and step are fixed, so a step trains more samples with more ranks.

    The loader's ``global_batch_size`` and the script's learning rate apply to ``reference_world_size`` ranks. With
    ``k`` times as many ranks, a step trains ``k`` times the samples, and its learning rate is multiplied by a factor.

    Args:
        scaling: the factor: ``"linear"`` is k, ``"sqrt"`` its square root, ``"adascale"`` between 1 and k by the
            measured noise of the gradients (Johnson et al., ICML 2020), ``"none"`` is 1. There is no default: the
            right one depends on the model and the optimizer.
        reference_world_size: number of ranks for which ``global_batch_size`` and the learning rate are chosen.
        momentum: compensation of momentum where the factor rises: a :class:`Ramp`; ``"rescale"`` divides the momentum
            buffers of SGD by the ratio; ``"none"`` does nothing. Where the factor falls, it falls at once.
        max_scale: limit of the factor: above some batch size no learning rate helps.
        scale_betas: whether Adam's betas and epsilon follow k as well: ``1 - k (1 - beta)``, ``eps / sqrt(k)``
            (Malladi et al., NeurIPS 2022, for ``"sqrt"``).
    """

    kind: Literal["fixed_per_worker"] = "fixed_per_worker"
    scaling: Literal["linear", "sqrt", "adascale", "none"]
    reference_world_size: int = Field(default=1, ge=1)
    momentum: Ramp | Literal["rescale", "none"] = Ramp()
    max_scale: float | None = Field(default=None, ge=1)
    scale_betas: bool = False


BatchPolicy = Annotated[FixedGlobalBatch | FixedPerWorkerBatch, Field(discriminator="kind")]
"""Either of the two policies."""
