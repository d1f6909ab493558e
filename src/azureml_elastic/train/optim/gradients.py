"""The gradient of a whole window from the micro-batches of all ranks.

Data parallelism averages over ranks, but the mean over samples is required. Each micro-batch's mean loss is weighted
accordingly, ranks exchange gradients in the backward pass of their last one only, and a rank without a sample takes
part with a weight of zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data import sampling
from azureml_elastic.train.data.position import MicroBatch, Position
from azureml_elastic.train.optim.exact_sum import ExactSum
from azureml_elastic.train.optim.gradient_averaging import data_parallel_parts
from azureml_elastic.train.optim.gradient_norms import GradientNorms
from azureml_elastic.train.optim.learning_rate import LearningRate

__all__ = ["Gradients"]


class Gradients:
    """The computation of a step's gradients, which are bit-identical at any world size if ``exact``."""

    def __init__(self, world: ProcessGroups, position: Position, rate: LearningRate, *, exact: bool) -> None:
        self._world = world
        self._position = position
        self._rate = rate
        self.exact = exact
        self._state: TrackedState | None = None
        self._modules: list[nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._syncing: tuple[bool, int] | None = None
        self._sum: _ExactStep | None = None
        self._exact_sum: ExactSum | None = None
        self._tokens: int | None = None
        self._norms: GradientNorms | None = None
        self._local = 0.0

    def attach(self, state: TrackedState) -> None:
        """Compute the gradients of the tracked objects, which the batch policy must support."""
        self._state = state
        self._modules = [part for module in state.modules for part in data_parallel_parts(module)]
        self._parameters = _unique(
            each for module in state.modules for each in module.parameters() if each.requires_grad
        )
        buffers = _unique(each for module in state.modules for each in module.buffers())
        self._buffers = [buffer for buffer in buffers if buffer.dtype != torch.bool]
        if not (self.exact or self._rate.measures_noise):
            return
        what = 'reduce="exact"' if self.exact else 'scaling="adascale"'
        if not state.replicated:
            raise UsageError(f"{what} needs the whole model on each rank; this one is sharded. Take another policy.")
        if self._rate.measures_noise:
            if state.scales_gradients:
                raise UsageError(f"{what} does not go with a GradScaler, whose scale changes. Train in bfloat16.")
            self._norms = GradientNorms(self._modules, self._parameters)
        elif any(isinstance(part, nn.SyncBatchNorm) for module in state.modules for part in module.modules()):
            raise UsageError(f"{what} and SyncBatchNorm do not go together: ranks have different numbers of batches.")

    def begin(self, micro: MicroBatch) -> None:
        """Prepare a micro-batch's forward pass."""
        if micro.index == 0:
            self._rate.begin()
            self._sum = self._tokens = None
            self._local = 0.0
        exchanged = micro.last and not self._position.accumulating and not self.exact
        self._sync(on=exchanged)
        if self._norms is not None:
            self._norms.begin(exchanged=exchanged and micro.index == 0)
        if self.exact:
            random_state.begin("exact", *micro.seed)
            if self._sum is None:
                if self._exact_sum is None:
                    self._exact_sum = ExactSum([*self._parameters, *self._buffers])
                self._sum = _ExactStep(self._parameters, self._buffers, self._exact_sum)

    def backward(self, loss: torch.Tensor, micro: MicroBatch, tokens: int | None) -> None:
        """Compute the gradients of a micro-batch.

        Args:
            loss: mean loss of the micro-batch
            micro: current micro-batch
            tokens: number of tokens that the loss is the mean over, ``None`` for a mean over the samples
        """
        if micro.index == 0:
            self._tokens = None if tokens is None else 0
        elif (tokens is None) != (self._tokens is None):
            raise UsageError("run.backward() got count= for some micro-batches of a step and not for others.")
        weight = micro.samples / micro.window.count if self.exact else micro.weight
        if tokens is not None:
            if not self._parameters:
                raise UsageError("run.backward(count=…) needs the model tracked, by itself and not as an engine.")
            assert self._tokens is not None
            own = tokens if micro.samples else 0
            self._tokens += own
            # The weight is relative to the window's samples, since the number of its tokens is known only at the end.
            ranks = 1 if self.exact else self._position.identity.world_size
            weight = sampling.weight(own, micro.window.count, ranks)
        weighed = loss if weight == 1 else loss * weight
        if self._state is None:
            weighed.backward()  # type: ignore[no-untyped-call]
        else:
            self._state.backward(weighed)
        if self._norms is not None and weight:
            self._local += micro.samples / micro.window.count * self._norms.local() / weight**2
        if self._sum is not None:
            self._sum.add(micro)
        if not micro.last or self._position.accumulating:
            return
        if self._sum is not None:
            self._sum.finish()
        mean = 0.0 if self._norms is None else self._norms.mean()
        if self._tokens is not None:
            total = self._world.control.total(float(self._tokens if self._position.counts else 0))
            self._normalise(total, micro.window.count)
            mean *= (micro.window.count / total) ** 2 if total else 1.0
        if self._norms is not None:
            self._observe(micro, mean)

    def _sync(self, *, on: bool) -> None:
        if (on, self._position.generation) == self._syncing:
            return
        for module in self._modules:
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = on
            elif hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(on, recurse=False)  # type: ignore[operator]
                module.set_is_last_backward(on)  # type: ignore[operator]
            elif not on:
                raise UsageError(
                    f"{type(module).__name__} cannot accumulate gradients over micro-batches here. Take fully_shard(), "
                    "or leave out micro_batch_size and logical_workers."
                )
        if self._state is not None:
            self._state.accumulate(last=on)
        self._syncing = (on, self._position.generation)

    def _normalise(self, tokens: float, samples: int) -> None:
        """Turn gradients that were divided by the window's samples into those divided by its tokens."""
        if tokens:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(samples / tokens)

    def _observe(self, micro: MicroBatch, mean: float) -> None:
        sums = torch.tensor([self._local, micro.index + 1 if micro.samples else 0], dtype=torch.float64)
        self._world.control.add_up(sums)
        local, batches = sums.tolist()
        first = self._position.first
        assert first is not None
        reference = first.spec.global_batch_size
        self._rate.observe(local, mean, micro_batches=round(batches), count=micro.window.count, reference=reference)


class _ExactStep:
    """The gradients of a step's micro-batches, and their changes to buffers such as those of batch normalisation.

    Each micro-batch begins with the buffers of the step before. At the end of the step they are the mean, weighted as
    gradients are; counters, such as the number of batches, add up.
    """

    def __init__(self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], total: ExactSum) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._total = total
        self._total.clear()  # of the terms of a step that was interrupted
        self._backward_passes = 0
        self._before = [parameter.grad for parameter in parameters]
        self._begun = [buffer.detach().clone() for buffer in self._buffers]
        for parameter in parameters:
            parameter.grad = None

    def add(self, micro: MicroBatch) -> None:
        """Take the gradients of a backward pass, and the changes of the buffers."""
        if self._backward_passes != micro.index:
            raise UsageError(
                f'reduce="exact" takes one run.backward() for each micro-batch, but this is the {micro.index + 1}. '
                f"micro-batch and call {self._backward_passes + 1}. Add the losses up before."
            )
        self._backward_passes += 1
        gradients: list[torch.Tensor | None] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        weight = micro.samples / micro.window.count
        changes: list[torch.Tensor | None] = []
        for buffer, begun in zip(self._buffers, self._begun, strict=True):
            changed = not torch.equal(buffer, begun)
            changes.append((buffer - begun) * (weight if buffer.is_floating_point() else 1) if changed else None)
            buffer.copy_(begun)
        if micro.samples:  # not a batch with weight zero
            self._total.add(gradients + changes)

    def finish(self) -> None:
        """Replace the gradients and the buffers by the sums over all ranks. A collective."""
        sums = self._total.finish()
        for parameter, before, total in zip(self._parameters, self._before, sums, strict=False):
            parameter.grad = before if total is None else total if before is None else before.add_(total)
        for buffer, total in zip(self._buffers, sums[len(self._parameters) :], strict=True):
            if total is not None:
                buffer.add_(total)


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(each): each for each in tensors}.values())
