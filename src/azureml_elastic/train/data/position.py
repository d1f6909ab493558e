"""The position of the run in its data: a cursor for each loader, and the micro-batches that are being trained.

Cursors advance only when ``run.commit()`` counts a step, so batches that worker processes have prefetched do not count
until they are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.config import BatchPolicy, FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.sampling import Cursor, LoaderSpec


@dataclass(frozen=True)
class Batching:
    """Division of windows, the samples of one optimizer step each, into micro-batches.

    Args:
        micro_batch_size: limit on the samples of a micro-batch, ``None`` for no limit
        micro_batches: number of micro-batches of each rank in each window, whatever their size; those for which there
            are no samples have a weight of 0. ``None`` for as many as the limit and the policy require
        equal_counts: whether all ranks have the same number of micro-batches in each window of an epoch, as training
            stacks with a fixed number of accumulation steps require; those without samples have a weight of 0
    """

    policy: BatchPolicy
    micro_batch_size: int | None = None
    micro_batches: int | None = None
    equal_counts: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} is below the limit of 1; give the samples of a forward pass."
            )
        if self.micro_batches is not None and self.micro_batches < 1:
            raise UsageError(f"micro_batches={self.micro_batches} is below the limit of 1; give the number in a step.")

    @property
    def logical_workers(self) -> int | None:
        """Number of logical workers that share a window, ``None`` to divide it among the ranks."""
        return self.policy.logical_workers if isinstance(self.policy, FixedGlobalBatch) else None

    @property
    def exact(self) -> bool:
        """Whether gradients, and so micro-batches, must be bit-identical at any world size."""
        return isinstance(self.policy, FixedGlobalBatch) and self.policy.reduce == "exact"

    def require_fitting(self, global_batch_size: int) -> None:
        """Raise ``UsageError`` if the policy cannot divide windows of a global batch size."""
        workers = self.logical_workers
        if workers is not None and workers > global_batch_size:
            raise UsageError(
                f"logical_workers={workers} is above global_batch_size={global_batch_size}; each needs a sample."
            )
        if isinstance(self.policy, FixedPerWorkerBatch) and global_batch_size % self.policy.reference_world_size:
            raise UsageError(
                f"global_batch_size={global_batch_size} cannot be divided by "
                f"reference_world_size={self.policy.reference_world_size}, so there is no batch per worker."
            )

    def window_size(self, global_batch_size: int, world_size: int) -> int:
        """Return the number of samples of a step at a world size."""
        if isinstance(self.policy, FixedPerWorkerBatch):
            return global_batch_size // self.policy.reference_world_size * world_size
        return global_batch_size


@dataclass(frozen=True)
class Window:
    """The samples of one optimizer step.

    Args:
        ids: indices in the dataset of the samples that this rank trains; empty where the window is smaller than the
            world
        count: number of samples over all ranks; 0 for a step that is discarded
        before: cursor until the step is committed
        after: cursor after the step
        epoch_size: number of samples that the whole epoch trains, ``None`` while that is unknown
        ends_epoch: whether the epoch has no window after this one
    """

    ids: tuple[int, ...]
    count: int
    before: Cursor
    after: Cursor
    epoch_size: int | None
    ends_epoch: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward pass on one rank.

    Args:
        window: window that it is a part of
        samples: number of samples that count: all, or none for a filler batch with which a rank without samples takes
            part in collectives
        weight: weight of its mean loss, see :func:`~azureml_elastic.train.data.sampling.weight`
        index: index among this rank's micro-batches of the window
        last: whether it is the last of those
        seed: random seed that is the same at any world size, where micro-batches do not depend on it
        parts: its parts as they are collated by themselves, where they are; see :mod:`..data.parted_batches`
    """

    window: Window
    samples: int
    weight: float
    index: int = 0
    last: bool = True
    seed: tuple[int, ...] = ()
    parts: Sequence[Any] | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class LoaderState:
    """The position of one loader; ``open`` is the micro-batch that is being trained."""

    name: str
    spec: LoaderSpec
    cursor: Cursor
    open: MicroBatch | None = None

    def require_committed(self) -> None:
        """Raise ``UsageError`` if a window is open."""
        if self.open is not None:
            raise UsageError(
                f"The loader was asked for the next batch, but run.commit() was not called after the last one "
                f"(epoch {self.cursor.epoch}, sample {self.cursor.consumed}). Call run.commit() after "
                "optimizer.step() in every iteration that does not accumulate: it counts the samples as trained."
            )


@dataclass(eq=False)
class Position:
    """The positions of all loaders.

    Args:
        identity: identity of this process in the round; under tensor parallelism that of all ranks that train the same
            samples, among as many groups of them
        counts: whether this rank is the first of those that train the same samples, so that its numbers count
        generation: number of round changes in this process
        in_epochs: whether the script is inside ``run.epochs()``
        stands_at: number of the call that the script's code after the last step has come to, of those that wait for
            other ranks; ``None`` where it has gone on. Ranks that stand at different calls are at different positions.
    """

    identity: WorkerIdentity
    counts: bool = True
    generation: int = 0
    epoch: int = 0
    in_epochs: bool = False
    stands_at: int | None = None
    loaders: dict[str, LoaderState] = field(default_factory=dict)
    _saved: dict[str, dict[str, Any]] = field(default_factory=dict)  # also of loaders that are not made yet
    _trained: int = 0

    @property
    def opened(self) -> list[LoaderState]:
        """The loaders with a micro-batch that is being trained."""
        return [loader for loader in self.loaders.values() if loader.open is not None]

    @property
    def accumulating(self) -> bool:
        """Whether the current step has more micro-batches."""
        for loader in self.loaders.values():  # noqa: SIM110 - several times a step
            if loader.open is not None and not loader.open.last:
                return True
        return False

    @property
    def first(self) -> LoaderState | None:
        """The first loader, whose steps are the unit of schedules."""
        return next(iter(self.loaders.values()), None)

    @property
    def first_window(self) -> Window | None:
        """The window of the first loader that is being trained, if any."""
        return None if self.first is None or self.first.open is None else self.first.open.window

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of the run and of each loader, which are equal within ``run.epochs()``."""
        return (self.epoch, *(loader.cursor.epoch for loader in self.loaders.values()))

    def add(self, name: str, spec: LoaderSpec) -> LoaderState:
        """Register a loader and return its state, at the position of the checkpoint if that has one."""
        if name in self.loaders:
            raise UsageError(
                f"run.loader() was called before with name={name!r}; a loader has one position in its data. Give each "
                "its own name; for evaluation take run.evaluate()."
            )
        cursor = Cursor(self.epoch)
        if name in self._saved:
            spec.require_same(self._saved[name]["spec"])
            cursor = Cursor.from_json(self._saved[name]["cursor"])
        return self.loaders.setdefault(name, LoaderState(name, spec, cursor))

    def enter(self, identity: WorkerIdentity) -> None:
        """Enter another round; batches that were fetched for the shares of the last one are not used."""
        self.identity = identity
        self.generation += 1

    def take(self, loader: LoaderState, micro: MicroBatch) -> bool:
        """Open a micro-batch; the window before it must be committed."""
        if micro.index == 0:
            loader.require_committed()
        loader.open = micro
        return True

    def repeat(self, loader: LoaderState) -> None:
        """Open a step that is discarded, after the last one of the epoch."""
        loader.require_committed()
        loader.open = MicroBatch(Window((), 0, loader.cursor, loader.cursor, None, ends_epoch=True), 0, 0.0)

    def leave(self, loader: LoaderState) -> None:
        """Close a loader's window without counting it."""
        loader.open = None

    def ended(self, loader: LoaderState, cursor: Cursor) -> None:
        """An epoch whose size was unknown ends here; there is nothing to record."""

    def require_whole(self) -> None:
        """Raise ``UsageError`` if the current step has more micro-batches."""
        for loader in self.opened:
            assert loader.open is not None
            if not loader.open.last:
                raise UsageError(
                    f"The step was ended after micro-batch {loader.open.index + 1} of the loader {loader.name!r}, but "
                    "it has more. Write `if run.accumulating: continue` after run.backward()."
                )

    def require_same_weight(self) -> None:
        """Raise ``UsageError`` if the open micro-batches of several loaders differ in weight."""
        micros = {loader.name: loader.open for loader in self.opened if loader.open is not None}
        if len({(micro.weight, micro.samples) for micro in micros.values()}) > 1:
            shares = {name: micro.samples for name, micro in micros.items()}
            raise UsageError(
                f"The current batches have different numbers of samples ({shares}), so the loss has no single weight. "
                "Give the loaders the same global_batch_size and lengths, or drop_last=True."
            )

    def commit(self) -> bool:
        """Count the open windows, which must be whole, as trained; return whether that ends the data of an epoch.

        The rest of the body of ``run.epochs()`` then belongs to the step.
        """
        self.require_whole()
        ending = False
        for loader in self.opened:
            assert loader.open is not None
            ending = ending or loader.open.window.ends_epoch
            self._trained += loader.open.window.count
            loader.cursor, loader.open = loader.open.window.after, None
        return self.in_epochs and ending

    def take_trained(self) -> int:
        """Return the number of samples over all ranks that were counted as trained since the last call."""
        trained, self._trained = self._trained, 0
        return trained

    def drop(self) -> None:
        """Close the open windows without counting them."""
        for loader in self.loaders.values():
            loader.open = None

    def end_epoch(self) -> None:
        """Advance to the next epoch."""
        self.drop()
        self.epoch += 1
        for loader in self.loaders.values():
            loader.cursor = Cursor(self.epoch)
        # A loader that is made from now on begins with this epoch, whatever position one of its name had in the last.
        self._saved = {name: each for name, each in self._saved.items() if name in self.loaders}

    def key(self) -> str:
        """Return a text that is equal at equal positions; the end of an epoch equals the next one's beginning."""
        cursors = {
            name: [loader.cursor.epoch + 1, 0] if loader.spec.over(loader.cursor) else loader.cursor.to_json()
            for name, loader in self.loaders.items()
        }
        return repr(sorted(cursors.items()))

    def to_json(self) -> dict[str, Any]:
        """Return the position, to be saved with a checkpoint."""
        loaders = dict(self._saved)
        for name, loader in self.loaders.items():
            loaders[name] = {"spec": loader.spec.to_json(), "cursor": loader.cursor.to_json()}
        return {"epoch": self.epoch, "loaders": loaders, "stands_at": self.stands_at}

    def load(self, document: Mapping[str, Any] | None) -> None:
        """Restore a saved position, ``None`` for the beginning; the loaders must have the data of the checkpoint."""
        saved = {} if document is None else dict(document["loaders"])
        for name, loader in self.loaders.items():
            if name in saved:
                loader.spec.require_same(saved[name]["spec"])
        self._saved = saved
        self.epoch = 0 if document is None else int(document["epoch"])
        self.stands_at = None if document is None else document["stands_at"]
        for name, loader in self.loaders.items():
            loader.cursor = Cursor.from_json(saved[name]["cursor"]) if name in saved else Cursor(self.epoch)
