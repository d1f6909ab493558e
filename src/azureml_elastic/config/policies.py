"""The policies of a run: checkpoints, batch, health, preemption, replacement, metrics and profiles."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration, Span, Takes, default

_DEFAULT_OUTPUT = "azureml://datastores/workspaceblobstore/paths/azureml-elastic/"

NonFinitePolicy = Literal["warn", "stop", "rollback"]
"""Response to a loss or to weights that are NaN or infinite."""

METADATA_ADDRESS = "http://169.254.169.254/metadata"
"""Azure's Instance Metadata Service, at the link-local address that every virtual machine reaches it by."""

CANCELLED_TAG = "azureml_elastic.cancelled"
"""Tag of a run's first job that its owner has cancelled. Azure ML cannot cancel a job whose nodes are all lost."""


class CheckpointPolicy(ConfigModel):
    """The checkpoints of a run.

    A checkpoint is also taken whenever the round is about to change and the workers can still reach a step boundary: at
    a join and at a preemption notice.

    Args:
        path: folder or mount that every node sees; ``None`` for one that the submission or the local cluster chooses.
        every: wall time between two checkpoints; ``"auto"`` for the Young/Daly interval of the measured cost and loss
            rate; ``None`` for no checkpoints by time.
        every_steps: optimizer steps between two checkpoints; ``None`` for no checkpoints by steps.
        snapshot_every: wall time between two snapshots in the memory of two nodes each. They cost less than
            checkpoints, and the run continues from them when no worker with the full state is left, as with sharded
            state. They take four times the memory of a rank's shard. ``"auto"`` for the interval by which the measured
            cost and loss rate lose the least time, where the loss of a worker would lose steps, the nodes have the
            memory, and ``snapshot_every_steps`` is not given; ``None`` for no snapshots by time.
        snapshot_every_steps: optimizer steps between two snapshots; ``None`` for no snapshots by steps.
        snapshot_path: folder on each node's own disk for copies of the snapshots, from which an agent that is restarted
            on the same machine recovers. Read from the job's policy, not from ``train.start()``. ``None`` for none.
        keep: number of committed checkpoints to keep, at least 2, so that a damaged one has a predecessor.
        keep_every_steps: optimizer steps between two checkpoints that are kept for good; ``None`` for none.
        on_nonfinite: response to a loss or to weights that are NaN or infinite, of which no checkpoint is taken:
            ``"warn"`` continues, ``"stop"`` ends the run without a restart, and ``"rollback"`` restarts it from its
            last checkpoint once the weights are affected.
    """

    path: str | None = None
    every: Takes[Literal["auto"] | PositiveDuration | None, Span | None] = default(timedelta(minutes=5))
    every_steps: int | None = Field(default=None, ge=1)
    snapshot_every: Takes[Literal["auto"] | PositiveDuration | None, Span | None] = default("auto")
    snapshot_every_steps: int | None = Field(default=None, ge=1)
    snapshot_path: str | None = None
    keep: int = Field(default=2, ge=2)
    keep_every_steps: int | None = Field(default=None, ge=1)
    on_nonfinite: NonFinitePolicy = "warn"

    @property
    def chooses_snapshots(self) -> bool:
        """Whether it follows from the state and the nodes if there are snapshots, and how many."""
        return self.snapshot_every == "auto" and self.snapshot_every_steps is None

    @property
    def output(self) -> str | None:
        """URI of a submitted job's output for checkpoints; ``None`` if the nodes use the path as it is.

        All nodes and runs share the URI; the nodes create a folder per run below it.
        """
        if self.path is None:
            return _DEFAULT_OUTPUT
        return self.path if self.path.startswith("azureml:") else None


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
    """

    kind: Literal["fixed_per_worker"] = "fixed_per_worker"
    scaling: Literal["linear", "sqrt", "adascale", "none"]
    reference_world_size: int = Field(default=1, ge=1)
    momentum: Takes[Ramp | Literal["rescale", "none"], Ramp | Literal["rescale", "none"] | Mapping[str, Any]] = default(
        Ramp()
    )
    max_scale: float | None = Field(default=None, ge=1)


BatchPolicy = Annotated[FixedGlobalBatch | FixedPerWorkerBatch, Field(discriminator="kind")]
"""Either of the two policies."""


class HealthPolicy(ConfigModel):
    """The checks of a node before it joins, the watch for hangs, and the strikes against hosts.

    A node *fails* the checks on a folder that is not writable, insufficient disk space or memory, an excessive clock
    difference, an unreachable port, or a GPU that hangs or computes incorrectly. All other findings are warnings.
    ``docs/explanation/failures.md`` lists the checks with their limits.

    Args:
        hang_timeout: time without a completed step after which the stacks of all workers are dumped and the round is
            restarted. ``"auto"`` derives it from measured step times; ``None`` disables hang detection.
        check: whether nodes are checked before they join.
        disk_mib: minimum free disk space in MiB in the run's, the checkpoints' and the temporary folder; a warning is
            reported below twice this value. ``None`` disables the check of the folders.
        quarantine_strikes: number of strikes within an hour at which a host is quarantined: its nodes train only if the
            minimum node count cannot be reached without them. ``None`` disables quarantine.
    """

    # In the order of CheckpointPolicy.every: typing caches unions without regard to their order, so the first one
    # decides that of the error messages of both.
    hang_timeout: Takes[Literal["auto"] | PositiveDuration | None, Span | None] = default("auto")
    check: bool = True
    disk_mib: int | None = Field(default=512, ge=0)
    quarantine_strikes: int | None = Field(default=2, ge=1)


def _metadata_address(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"scheduled_events={value!r} is no address ({error}); give {METADATA_ADDRESS}") from error
    wrong = parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or port == 0
    if wrong or any(character.isspace() for character in value):
        raise ValueError(
            f"scheduled_events={value!r} is not of the form http://host[:port]/path; give {METADATA_ADDRESS}, or null "
            "where there is no metadata service"
        )
    return value.rstrip("/")


class PreemptionPolicy(ConfigModel):
    """The sources of preemption notices and the response to them.

    SIGTERM or SIGINT to a node's agent always counts as a notice.

    Args:
        grace: maximum time between the notice and the workers' exit, within which they reach a step boundary and save
            a checkpoint.
        scheduled_events: base address of the metadata service that announces Azure's scheduled events, without the
            ``/scheduledevents`` suffix. ``None`` disables polling.
        marker: path of a file whose existence is a notice; ``{node}`` is replaced by the node's identifier. ``None``
            disables the file.
    """

    grace: Takes[Duration, Span] = default(timedelta(seconds=25))
    scheduled_events: Annotated[str, AfterValidator(_metadata_address)] | None = METADATA_ADDRESS
    marker: str | None = Field(default=None, min_length=1)


class ReplacementPolicy(ConfigModel):
    """Limits and intervals for replacing nodes that are lost or do not start.

    The node of rank 0 replaces nodes where its identity may read and submit jobs; ``azureml-elastic replace-nodes``
    does the same from any machine.

    Args:
        by_nodes: whether the run's own nodes replace lost ones; if false, only the command does.
        interval: time between two checks of the jobs.
        fallback_after: time that a node may wait for a machine before one of the next pool is requested.
        retry_after: pause after a node that ended within two minutes; it doubles with each further one in a row, up to
            an hour.
        max_replacements: maximum number of node jobs beyond the first ones; ``None`` means ten for each node of
            ``max_instance_count``.
        budget: cost in USD from which no further node is requested. Requires the price of every pool.
    """

    by_nodes: bool = True
    interval: Takes[PositiveDuration, Span] = default(timedelta(seconds=30))
    fallback_after: Takes[Duration, Span] = default(timedelta(minutes=10))
    retry_after: Takes[PositiveDuration, Span] = default(timedelta(minutes=1))
    max_replacements: int | None = Field(default=None, ge=0)
    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class MetricsPolicy(ConfigModel):
    """Where the agent of rank 0's node publishes what the script logs, and the metrics of the run itself.

    Publishing never delays or fails a run. Metrics and spans are exported by OpenTelemetry, too, where
    ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set and ``OTEL_SDK_DISABLED`` is not ``true``; this needs the extra
    ``opentelemetry``.

    Args:
        mlflow: whether to publish to MLflow, where ``MLFLOW_TRACKING_URI`` is set, as on Azure ML, and MLflow is
            installed.
        tensorboard: folder for TensorBoard's files, which all nodes see, or one that Azure ML uploads; variables of the
            node, as in ``"$AZURE_ML_OUTPUT_logs"``, are expanded. ``None`` for no files. Needs the extra
            ``tensorboard``.
    """

    mlflow: bool = True
    tensorboard: str | None = Field(default=None, min_length=1)


def _ranks(value: tuple[int, ...]) -> tuple[int, ...]:
    wrong = [rank for rank in value if rank < 0]
    if wrong or not value:
        raise ValueError(f'ranks={list(value)} has {wrong or "none"}; give numbers from 0, as in (0, 4), or "all"')
    return tuple(sorted(set(value)))


class Profile(ConfigModel):
    """Recording of a few steps by PyTorch's profiler, for TensorBoard; the other steps are not slowed down.

    Args:
        first_step: first recorded step, counted from 1 over the whole run, restarts included.
        steps: number of consecutive recorded steps, which form one trace.
        warmup_steps: number of steps before them in which the profiler runs without keeping anything.
        every_steps: number of steps between the starts of two recordings; ``None`` to record once.
        each_round: whether steps are counted from 1 in each round, so that every world size has its traces.
        ranks: ranks that record, or ``"all"``; ranks that a round does not have are ignored.
        folder: folder of the traces, in which the node's variables, as in ``"$AZURE_ML_OUTPUT_traces"``, are expanded;
            ``None`` for ``profiles`` in the run folder, which Azure ML uploads.
    """

    first_step: int = Field(default=10, ge=1)
    steps: int = Field(default=3, ge=1)
    warmup_steps: int = Field(default=2, ge=0)
    every_steps: int | None = Field(default=None, ge=1)
    each_round: bool = False
    ranks: Takes[
        Literal["all"] | Annotated[tuple[int, ...], AfterValidator(_ranks)],
        Literal["all"] | tuple[int, ...] | list[int],
    ] = default((0,))
    folder: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _recordings_do_not_meet(self) -> Self:
        if self.every_steps is not None and self.every_steps < self.steps + self.warmup_steps:
            raise ValueError(
                f"every_steps={self.every_steps} is below steps + warmup_steps = {self.steps + self.warmup_steps}, so "
                "one recording would begin before the previous one has ended; raise every_steps, or lower one of the "
                "others"
            )
        return self

    def __str__(self) -> str:
        each = "" if self.every_steps is None else f", every {self.every_steps} steps"
        counted = " of each round" if self.each_round else ""
        where = "all ranks" if self.ranks == "all" else f"rank {', '.join(str(rank) for rank in self.ranks)}"
        last = self.first_step + self.steps - 1
        what = f"step {self.first_step}" if last == self.first_step else f"steps {self.first_step} to {last}"
        return f"{what}{counted}{each} on {where}"


def recorded_after(profile: Profile, completed: int, entered: int) -> tuple[int, int] | None:
    """Return the first and the last step of the next complete recording, ``None`` if there is none.

    Args:
        completed: completed steps of the run.
        entered: completed steps at the beginning of the round.
    """
    origin = entered if profile.each_round else 0
    behind = max(0, completed - origin - (profile.first_step - 1))  # completed steps since the first recording began
    if behind and profile.every_steps is None:
        return None
    each = profile.every_steps or 1
    # Rounded up: a recording that should have begun before now would lack its first steps.
    first = origin + profile.first_step + -(-behind // each) * each
    return first, first + profile.steps - 1
