"""The gradient of a whole window from the micro-batches of all ranks, and its norms.

Data parallelism averages over ranks, but the mean over samples is required. Each micro-batch's mean loss is weighted
accordingly, ranks exchange gradients in the backward pass of their last one only, and a rank without a sample takes
part with a weight of zero. Gradients have the shape of their parameters; losses and norms are numbers, of shape ().

AdaScale needs the squared norms of a micro-batch's gradient and of the mean over the ranks. Where the ranks exchange
the gradient of a single micro-batch, both are taken of the buckets of ``DistributedDataParallel``, before and after the
exchange: a bucket is one tensor, that has just been written. Where a rank accumulates over several, or the script has a
communication hook of its own, a hook of each parameter takes the norms instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked import unwrap_optimizer
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data import sampling
from azureml_elastic.train.data.position import MicroBatch, Position
from azureml_elastic.train.optim.exact_sum import ExactSum
from azureml_elastic.train.optim.learning_rate import LearningRate

_DATA_PARALLEL = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}


def data_parallel_parts(module: nn.Module, *others: str) -> list[nn.Module]:
    """Return the parts of a module that are of a class of torch, or of the given names, that averages gradients."""
    wanted = _DATA_PARALLEL.union(others)
    return [part for part in module.modules() if wanted & {kind.__name__ for kind in type(part).__mro__}]


def _averages_gradients(module: nn.Module) -> bool:
    """Return whether all parameters are within DDP, FSDP or a DeepSpeed engine, or DTensors."""
    wrapped = data_parallel_parts(module, "DeepSpeedEngine")
    averaged = {id(parameter) for part in wrapped for parameter in part.parameters()}
    return all(
        id(parameter) in averaged or isinstance(parameter, DTensor)
        for parameter in module.parameters()
        if parameter.requires_grad
    )


def require_averaging(objects: Mapping[str, Any], exempt: Sequence[nn.Module], world_size: int) -> None:
    """Raise ``UsageError`` if a module among the objects does not average its gradients and is not exempt.

    A module beside those that the optimizers among the objects train is state, such as a moving average of one.
    """
    optimizers = [each for each in map(unwrap_optimizer, objects.values()) if isinstance(each, Optimizer)]
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for name, value in objects.items():
        if not isinstance(value, nn.Module) or any(value is each for each in exempt) or _averages_gradients(value):
            continue
        if trained and not any(id(each) in trained for each in value.parameters()):
            continue
        when = "" if world_size > 1 else " as soon as the run has more than 1 rank"
        raise UsageError(
            f"The gradients of {name}={type(value).__name__} are not averaged over the ranks, so each rank would train "
            f"a model of its own{when}. Write `model = run.wrap(model)` before the optimizer is made, or apply "
            "DistributedDataParallel or fully_shard(). If the script averages the gradients by itself, write "
            "`model = run.wrap(model, average_gradients=False)`."
        )


@dataclass(eq=False)
class _Norms:
    """What the hooks of one backward pass have found; without references to models, whose reducers refer to it.

    Args:
        in_buckets: whether the norms are those of buckets
        local: squared norms before the exchange, () each
        buckets: buckets that were exchanged, (numbers of some gradients,) each
    """

    in_buckets: bool = False
    local: list[torch.Tensor] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)

    def clear(self) -> None:
        self.local.clear()
        self.buckets.clear()


class GradientNorms:
    """The norms of the gradients of parameters, which modules average over the ranks."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._models = [each for each in modules if isinstance(each, DistributedDataParallel)]
        averaged = {id(parameter) for model in self._models for parameter in model.parameters()}
        self._has_buckets = all(id(parameter) in averaged for parameter in parameters)
        self._has_hooks = False
        self._norms = _Norms()

    def begin(self, *, exchanged: bool) -> None:
        """Prepare for the forward and backward pass of a micro-batch.

        Args:
            exchanged: whether its gradient alone is exchanged
        """
        self._norms.clear()
        self._norms.in_buckets = exchanged and self._has_buckets
        if self._norms.in_buckets:
            # For good, where the script has a hook of its own: torch takes one for each model.
            self._has_buckets = self._norms.in_buckets = all(_hook(model, self._norms) for model in self._models)
        if not self._norms.in_buckets and not self._has_hooks:
            self._has_hooks = True
            for parameter in self._parameters:
                parameter.register_hook(self._measure)  # type: ignore[no-untyped-call]

    def local(self) -> float:
        """Return the squared norm of the gradient of the micro-batch."""
        return _total(self._norms.local)

    def mean(self) -> float:
        """Return the squared norm of the gradients that the parameters have after the exchange."""
        if self._norms.in_buckets:
            return _total([_squared(bucket) for bucket in self._norms.buckets])
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norms = torch._foreach_norm([each.to(_dtype_of_norm(each)) for each in gradients])  # noqa: SLF001 - what clip_grad_norm_ uses
        return _total([norm.double().square() for norm in norms])

    def _measure(self, gradient: torch.Tensor) -> None:
        if not self._norms.in_buckets:
            self._norms.local.append(_squared(gradient.detach()))


def _hook(model: DistributedDataParallel, norms: _Norms) -> bool:
    """Have the norms of a model's buckets taken; return false if the script has a communication hook of its own."""
    registered: list[tuple[Any, Any]] = model._comm_hooks  # noqa: SLF001 - also of a model that was formed again
    if registered:
        return registered[0][1] is norms
    group = model.process_group
    try:
        # torch compares annotations, which are texts in this module; a lambda has none.
        # By torch's class: ElasticDataParallel would keep it for the next group as the script's own.
        DistributedDataParallel.register_comm_hook(
            model, norms, lambda norms, bucket: _exchange(norms, bucket.buffer(), group)
        )
    except RuntimeError:  # torch allows one, and a built-in one is not in the list
        return False
    return True


def _exchange(norms: _Norms, bucket: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, (numbers,), over the ranks, as torch does without a hook, and take its norm before that."""
    if norms.in_buckets:
        norms.local.append(_squared(bucket))  # queued before the exchange, which overwrites the bucket
        norms.buckets.append(bucket)  # the mean will be there, and holds until the next backward pass
    # Divided before the sum, as torch's own reducer does: results are those without a hook, bit by bit.
    work = dist.all_reduce(bucket.div_(group.size()), group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


def _squared(tensor: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of a tensor of any shape as (), in 32 bits at least."""
    if tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64):
        flat = tensor.view(-1)
        return torch.dot(flat, flat)  # four fifths of the time of a norm, and without its root
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=_dtype_of_norm(tensor))
    return norm.square()


def _dtype_of_norm(gradient: torch.Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def _total(squares: Sequence[torch.Tensor]) -> float:
    if len({each.dtype for each in squares}) > 1:
        squares = [each.double() for each in squares]
    return float(torch.stack(list(squares)).sum(dtype=torch.float64).item()) if squares else 0.0


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
        # In the last micro-batch of all loaders that are open; exact sums exchange the gradients by themselves.
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
        """Compute the gradients of a micro-batch. A collective in the last one of a step.

        Args:
            loss: mean over the micro-batch, of one element
            tokens: number of tokens that the loss is the mean over, ``None`` for a mean over the samples

        Raises:
            UsageError: ``tokens`` is given for some micro-batches of a step only, or cannot be had here.
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
            # The gradient is that of the weighted loss. This term is b_i/N |g_i|^2 of GradientNoiseScale.
            self._local += micro.samples / micro.window.count * self._norms.local() / weight**2
        if self._sum is not None:
            self._sum.add(micro)
        if not micro.last or self._position.accumulating:
            return
        if self._sum is not None:
            self._sum.finish()
        mean = 0.0 if self._norms is None else self._norms.mean()  # before gradients are scaled to the number of tokens
        if self._tokens is not None:
            total = self._world.control.total(float(self._tokens if self._position.counts else 0))
            self._normalise(total, micro.window.count)
            mean *= (micro.window.count / total) ** 2 if total else 1.0
        if self._norms is not None:
            self._observe(micro, mean)

    def _sync(self, *, on: bool) -> None:
        if (on, self._position.generation) == self._syncing:
            return  # a model that was formed again for another round has torch's default
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
        sums = torch.tensor([self._local, micro.index + 1 if micro.samples else 0], dtype=torch.float64)  # (2,)
        self._world.control.add_up(sums)
        local, batches = sums.tolist()
        first = self._position.first
        assert first is not None
        reference = first.spec.global_batch_size
        self._rate.observe(local, mean, micro_batches=round(batches), count=micro.window.count, reference=reference)


class _ExactStep:
    """The gradients of a step's micro-batches, and their changes to buffers such as those of batch normalisation.

    Each micro-batch begins with the buffers of the step before. At the end of the step they are the mean, weighted as
    gradients are; counters, such as the number of batches, add up. A term of the sum has the gradients, each of the
    shape of its parameter, and then the changes of the buffers, each of the shape of its buffer.
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
            changed = not torch.equal(buffer, begun)  # waits for the device; an unchanged buffer is not sent
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
