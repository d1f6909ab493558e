"""The base of the elastic data loaders: each sample is trained once an epoch at any sequence of world sizes.

An iteration yields one micro-batch of this rank. The position in the data advances only when ``run.commit()`` counts
the step, so batches that worker processes have prefetched do not count until they are trained.

Random transformations are the same at any world size: they are seeded by the micro-batch, not by the process.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.random_state import seed_of
from azureml_elastic.distributed.device import Device, device_of
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.position import Batching, LoaderState, MicroBatch, Position
from azureml_elastic.train.data.sampling import Cursor

_OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last")


class SeededIds(list[int]):
    """Ids of the samples of a micro-batch, with the seed of its random numbers."""

    def __init__(self, ids: Sequence[int] = (), seed: tuple[int, ...] = ()) -> None:
        super().__init__(ids)
        self.seed = seed


@dataclass(eq=False)
class SeededDataset:
    """A map-style dataset whose random numbers depend on the micro-batch that is fetched.

    Its sequences go on where the samples are collated. The script's own are not restored afterwards: those of the
    training process begin anew before each micro-batch is trained.
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: SeededIds) -> list[Any]:
        """Return the samples of a micro-batch; called by torch."""
        random_state.begin("fetch", *ids.seed)
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(ids)) if many else [self.dataset[index] for index in ids])


@contextlib.contextmanager
def seeded(*seed: object) -> Iterator[None]:
    """Begin random sequences with a seed; outside of a data loader's process, restore the script's own afterwards."""
    with random_state.kept() if get_worker_info() is None else contextlib.nullcontext():
        random_state.begin("fetch", *seed)
        yield


class StepCalls(Protocol):
    """What loaders tell of the steps that they have batches for: to a session, or to the position alone."""

    def take(self, loader: LoaderState, micro: MicroBatch) -> bool:
        """Begin a micro-batch that is about to be yielded; return whether the round is still that of its window."""

    def repeat(self, loader: LoaderState) -> None:
        """Begin a step that is discarded, after the last one of the epoch."""

    def leave(self, loader: LoaderState) -> None:
        """End a step that the script has left before its commit."""

    def ended(self, loader: LoaderState, cursor: Cursor) -> None:
        """Record the end of an epoch, whose size was unknown before."""


@dataclass(frozen=True)
class LoaderContext:
    """Settings of an elastic loader beside its data.

    Args:
        steps: receiver of calls; ``None`` for the position alone
        loader_class: ``torch.utils.data.DataLoader``, or a class of the same arguments, such as torchdata's
            ``StatefulDataLoader``
        options: further arguments of that class
    """

    position: Position
    device: torch.device
    batching: Batching
    loader_class: type[DataLoader[Any]] = DataLoader
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: StepCalls | None = None


class ElasticLoader(ABC):
    """Iterable over this rank's batches, from the position in the data to the epoch's end; see ``run.loader()``."""

    def __init__(self, state: LoaderState, context: LoaderContext) -> None:
        require_foreign(context.options)
        self._state = state
        self._context = context
        self._position = context.position
        self._steps: StepCalls = context.steps or context.position
        self._batching = context.batching
        self._collate = context.options.get("collate_fn") or default_collate
        self._generator = torch.Generator()
        self._last_epoch: int | None = None  # of the last batch that was yielded

    @property
    def name(self) -> str:
        """Name of the loader within the run."""
        return self._state.name

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch at the reference world size, the unit of learning rate schedules.

        Raises:
            UsageError: the dataset is in shards, whose samples are not counted ahead.
        """
        raise UsageError(
            f"The loader {self.name!r} has no steps_per_epoch: its dataset is in shards, whose samples are not counted "
            "ahead. Give the schedule a number of steps of your own."
        )

    def __len__(self) -> int:
        """Return the number of batches that an iteration which begins now yields on this rank.

        That is the rest of the current epoch if the run has resumed in its middle, and the next epoch outside of
        ``run.epochs()`` once the current one is trained. It counts micro-batches, follows ``drop_last``, and holds
        while the world size stays.

        Raises:
            TypeError: the dataset is in shards, as of torch's ``DataLoader`` where it has no length.
        """
        raise TypeError(f"The loader {self.name!r} has no length: its dataset is in shards")

    @property
    def _spec(self) -> Any:
        return self._state.spec.at(self._state.cursor.epoch)

    @property
    def over(self) -> bool:
        """Whether the current epoch is known to have no more batches."""
        return bool(self._spec.over(self._state.cursor))

    @abstractmethod
    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples."""

    @abstractmethod
    def filler(self) -> Any:
        """Return a collated batch of one or two samples of the dataset, for a step that is discarded."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            UsageError: ``run.commit()`` was not called after the last batch.
        """
        position, state = self._position, self._state
        self._steps.leave(state)  # an epoch that was left in the middle of a step
        if not position.in_epochs and self.over:
            state.cursor = Cursor(state.cursor.epoch + 1)
        epoch, resumed, again = state.cursor.epoch, state.cursor.consumed > 0, True
        while again and state.cursor.epoch == epoch:
            again, generation = False, position.generation
            # torch seeds its workers from this generator, so the script's own random numbers do not depend on restarts.
            begin = (state.cursor.epoch, state.cursor.consumed)
            self._generator.manual_seed(seed_of(self._spec.seed, *begin, position.identity.rank))
            for micro, batch in self.batches():
                if generation != position.generation or not self._steps.take(state, micro):
                    break  # the round has changed while the batch was fetched, or before its step could begin
                self._last_epoch = epoch
                yield to_device(batch, self._context.device)
                # Closed and not counted: the step was discarded. Its samples come again, in shares of the new round.
                dropped = micro.last and state.open is None and state.cursor != micro.window.after
                if dropped or generation != position.generation:
                    state.require_committed()
                    again = True
                    break
            again = again or generation != position.generation
        state.require_committed()
        if resumed and position.in_epochs and self._last_epoch != epoch:
            # The run has resumed after the epoch's last step. The loop's body runs once, without training anything, so
            # that its variables are set for the code after the loop, which has not run.
            self._last_epoch = epoch
            batch = self.filler()
            self._steps.repeat(state)
            yield to_device(batch, self._context.device)
            state.require_committed()

    @property
    def _window_size(self) -> int:
        return self._batching.window_size(self._spec.global_batch_size, self._position.identity.world_size)

    def _make(self, dataset: Any, **own: Any) -> DataLoader[Any]:
        """Return a ``DataLoader`` with the script's options, replaced by the given ones."""
        defaults = {"pin_memory": device_of(self._context.device).separate, "generator": self._generator}
        return self._context.loader_class(dataset, **{**defaults, **self._context.options, **own})


def require_foreign(options: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if an option of a ``DataLoader`` is one that an elastic loader sets itself."""
    ours = sorted(set(options) & set(_OURS))
    if ours:
        raise UsageError(
            f"run.loader() sets {', '.join(ours)} itself, from global_batch_size, micro_batch_size, shuffle and "
            "drop_last; remove the DataLoader argument."
        )


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors, of the same shapes and types, on a device; other objects by their ``to()``."""
    kind = device_of(device)
    return _copied_in(value, kind) if kind.separate else value


def _copied_in(value: Any, device: Device) -> Any:
    if isinstance(value, torch.Tensor):
        return device.copy_in(value)
    if isinstance(value, Mapping):
        items = {key: _copied_in(item, device) for key, item in value.items()}
        kind: Any = type(value)
        try:
            return kind(items)  # scripts read a tokenizer's batch by attributes
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copied_in(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_copied_in(item, device) for item in value)
    # A graph, for example; stacks move their batches likewise.
    return value.to(device.torch) if callable(getattr(value, "to", None)) else value
