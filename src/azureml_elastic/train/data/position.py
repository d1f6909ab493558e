"""Where the run stands in its data: a cursor for each loader, and the micro-batches that are being trained.

The cursors move only when ``run.commit()`` commits, so what worker processes have prefetched does not count until it is
trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.sampling import Cursor

if TYPE_CHECKING:
    from azureml_elastic.ipc.agent_interface import WorkerIdentity

__all__ = ["LoaderSpec", "LoaderState", "MicroBatch", "Position", "Window"]


class LoaderSpec(Protocol):
    """What must stay the same over all restarts for a loader's cursor to mean the same."""

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all ranks, at the reference world size."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""

    def over(self, cursor: Cursor) -> bool:
        """Tell whether the epoch is known to have no more samples."""

    def require_same(self, saved: Mapping[str, Any]) -> None:
        """Check the fields of a checkpoint against these.

        Raises:
            UsageError: they differ.
        """


@dataclass(frozen=True)
class Window:
    """The data of one optimizer step.

    Args:
        ids: of the samples that this rank trains; none where the window is smaller than the world.
        count: samples over all ranks.
        before: the cursor until the step is committed.
        after: the cursor from then on.
        epoch_size: samples that the whole epoch trains, ``None`` while that is not known.
    """

    ids: tuple[int, ...]
    count: int
    before: Cursor
    after: Cursor
    epoch_size: int | None


@dataclass(frozen=True)
class MicroBatch:
    """What a rank trains in one forward and backward pass.

    Args:
        window: of which it is a part.
        samples: of it that count: all, or none where the batch is a stand-in, so that this rank takes part in the
            collectives.
        weight: of its mean loss, see :func:`~azureml_elastic.train.data.sampling.weight`.
        index: among this rank's of the window.
        last: whether it is the last of those.
        place: names it whatever the world size, where the micro-batches do not depend on it.
    """

    window: Window
    samples: int
    weight: float
    index: int = 0
    last: bool = True
    place: tuple[int, ...] = ()


class LoaderState:
    """One loader's place.

    Args:
        name: of the loader.
        cursor: how far its data are trained.

    Attributes:
        open: the micro-batch at hand.
    """

    def __init__(self, name: str, cursor: Cursor) -> None:
        self.name = name
        self.cursor = cursor
        self.open: MicroBatch | None = None


class Position:
    """Where the data stand.

    Args:
        identity: of this process.

    Attributes:
        identity: of this process in the round.
        generation: counts the changes of it.
        epoch: at hand, as ``run.epochs()`` counts.
        in_epochs: whether it counts.
        streams: by the name of the loader.
        when_opened: called with each micro-batch before it is trained.
        when_ended: called at the end of an epoch whose samples were not known before, with the cursor there.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        self.generation = 0
        self.epoch = 0
        self.in_epochs = False
        self.loaders: dict[str, LoaderState] = {}
        self.when_opened: Callable[[LoaderState, MicroBatch], None] = lambda _, __: None
        self.when_ended: Callable[[LoaderState, Cursor], None] = lambda _, __: None
        self._specs: dict[str, LoaderSpec] = {}
        self._saved: dict[str, dict[str, Any]] = {}

    @property
    def opened(self) -> list[LoaderState]:
        """The loaders whose batches are at hand."""
        return [stream for stream in self.loaders.values() if stream.open is not None]

    @property
    def accumulating(self) -> bool:
        """Whether more micro-batches of the step at hand are to come."""
        for stream in self.loaders.values():  # noqa: SIM110 - several times a step
            if stream.open is not None and not stream.open.last:
                return True
        return False

    def add(self, name: str, spec: LoaderSpec) -> LoaderState:
        """Take note of a loader, whose place may be known from a checkpoint.

        Raises:
            UsageError: there is one of this name, or its data differ from those of the checkpoint.
        """
        if name in self.loaders:
            raise UsageError(
                f"run.loader() was called before with name={name!r}; a loader has one position in its data. Give each "
                "its own name; for evaluation take run.evaluate()."
            )
        cursor = Cursor(self.epoch)
        if name in self._saved:
            spec.require_same(self._saved[name]["spec"])
            cursor = Cursor.from_json(self._saved[name]["cursor"])
        self._specs[name] = spec
        self.loaders[name] = LoaderState(name, cursor)
        return self.loaders[name]

    @property
    def first_spec(self) -> LoaderSpec | None:
        """That of the first loader, in whose steps schedules count."""
        return next(iter(self._specs.values()), None)

    @property
    def first_window(self) -> Window | None:
        """The window of the first loader, ``None`` where it is not open."""
        first = next(iter(self.loaders.values()), None)
        return None if first is None or first.open is None else first.open.window

    @property
    def epochs(self) -> tuple[int, ...]:
        """The run's, and those of the loaders, which are the same within ``run.epochs()``."""
        return (self.epoch, *(stream.cursor.epoch for stream in self.loaders.values()))

    def enter(self, identity: WorkerIdentity) -> None:
        """Go on with the ranks of another round, whose shares are others: what was fetched is of no use any more."""
        self.identity = identity
        self.generation += 1

    def take(self, stream: LoaderState, micro: MicroBatch) -> None:
        """Open a micro-batch.

        Raises:
            UsageError: the window before was not committed.
        """
        if micro.index == 0:
            self.require_committed(stream)
        stream.open = micro
        self.when_opened(stream, micro)

    @staticmethod
    def require_committed(stream: LoaderState) -> None:
        """Check that no window is open.

        Raises:
            UsageError: one is.
        """
        if stream.open is not None:
            raise UsageError(
                f"The loader was asked for the next batch, but run.commit() was not called after the last one "
                f"(epoch {stream.cursor.epoch}, sample {stream.cursor.consumed}). Call run.commit() after "
                "optimizer.step() in every iteration that does not accumulate: it counts the samples as trained."
            )

    def require_whole(self) -> None:
        """Check that the step at hand has seen all of its micro-batches.

        Raises:
            UsageError: more are to come.
        """
        for stream in self.opened:
            assert stream.open is not None
            if not stream.open.last:
                raise UsageError(
                    f"The step was ended after micro-batch {stream.open.index + 1} of the loader {stream.name!r}, but "
                    "more of its samples are to come. Write `if run.accumulating: continue` after run.backward()."
                )

    def commit(self) -> None:
        """Count the open windows as trained.

        Raises:
            UsageError: they are not whole.
        """
        self.require_whole()
        for stream in self.opened:
            assert stream.open is not None
            stream.cursor, stream.open = stream.open.window.after, None

    def drop(self) -> None:
        """Forget the open windows."""
        for stream in self.loaders.values():
            stream.open = None

    def end_epoch(self) -> None:
        """Go on with the next epoch."""
        self.drop()
        self.epoch += 1
        for stream in self.loaders.values():
            stream.cursor = Cursor(self.epoch)
        self._saved = {name: each for name, each in self._saved.items() if name in self.loaders}

    def here(self) -> str:
        """Name the position, equal for equal ones; an epoch's end is the next one's beginning."""
        places: dict[str, Any] = {}
        for name, stream in self.loaders.items():
            over = self._specs[name].over(stream.cursor)
            places[name] = [stream.cursor.epoch + 1, 0] if over else stream.cursor.to_json()
        return repr(sorted(places.items()))

    def to_json(self) -> dict[str, Any]:
        """Return the position, to be saved with a checkpoint."""
        loaders = dict(self._saved)
        for name, stream in self.loaders.items():
            loaders[name] = {"spec": self._specs[name].to_json(), "cursor": stream.cursor.to_json()}
        return {"epoch": self.epoch, "loaders": loaders}

    def load(self, document: Mapping[str, Any] | None) -> None:
        """Go to a saved position, ``None`` for the beginning.

        Raises:
            UsageError: the data differ from those of the checkpoint.
        """
        saved = {} if document is None else dict(document["loaders"])
        for name, spec in self._specs.items():
            if name in saved:
                spec.require_same(saved[name]["spec"])
        self._saved = saved
        self.epoch = 0 if document is None else int(document["epoch"])
        for name, stream in self.loaders.items():
            stream.cursor = Cursor.from_json(saved[name]["cursor"]) if name in saved else Cursor(self.epoch)
