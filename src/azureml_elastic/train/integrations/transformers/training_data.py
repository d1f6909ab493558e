"""The training data of a ``Trainer``: how they are divided among the ranks, and what is counted by them.

Where they cannot be divided by their index, transformers divides them, and the run keeps its position in them: the
number of batches that all ranks have trained in the epoch. transformers and accelerate give the ranks batch after batch
of one sequence in turn, so that another number of ranks continues there.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.integrations import sources
from azureml_elastic.train.integrations.accelerate.training_data import FULL_RANKS
from azureml_elastic.train.integrations.wrapping import Wrapped
from azureml_elastic.train.session.stack_session import StackSession

_LOG = logging.getLogger(__name__)

DATA_METHODS = {
    name: name.lstrip("_") for name in ("get_train_dataloader", "_get_train_sampler", "get_total_train_batch_size")
}
"""Methods of a trainer, and those of :class:`TrainingData` in their place."""


class TrainingData:
    """The loader of a training; the methods that take ``wrapped`` are called in place of the trainer's.

    Attributes:
        accumulation: batches of a rank in a step of a run with all nodes
        loader: loader of the session's, if the data can be divided by their index
        left: loader that transformers divides, if not
    """

    def __init__(self, session: StackSession, trainer: Any) -> None:
        self._session = session
        self._trainer = trainer
        self.accumulation = trainer.args.gradient_accumulation_steps
        self.loader: WindowLoader | None = None
        self.left: LeftLoader | None = None

    def get_train_dataloader(self, wrapped: Wrapped) -> Any:
        """Return a loader of windows over the data of the trainer's own, where they can be divided by their index."""
        prepared, trainer, session = wrapped(), self._trainer, self._session
        # What it does with a batch is not known: it may collect some of a step, count them, or divide by their number.
        own_step = sources.calls_its_own(trainer, "training_step") or sources.calls_its_own(trainer, "_prepare_inputs")
        arguments, full = trainer.args, session.reference_world_size
        reason = sources.obstacle(prepared)
        if reason is not None:
            left = self.left = LeftLoader(
                prepared,
                ranks=session.world_size,
                full=full,
                accumulation=self.accumulation,
                keep_count=own_step is not None,
            )
            if session.is_main:
                _LOG.warning(
                    "transformers divides the training data among the ranks: %s. Steps and learning rates are those of "
                    "a run with all nodes. After a change of their number %s, and data that come in another order when "
                    "they are read again may repeat or be left out in that epoch.",
                    reason,
                    "a step trains more or fewer samples, some of them never"
                    if own_step
                    else "a step may train some more samples",
                )
            # By it and by the loader's length the trainer counts steps from here on; `train` sets it back.
            arguments.gradient_accumulation_steps = left.accumulation
            return left
        source = sources.source_of(prepared, full)
        if not source.divided and session.is_main:
            _LOG.warning(
                "%s.get_train_dataloader() returns a loader of which each rank would train all samples: they are "
                "divided among the ranks.",
                type(trainer).__name__,
            )
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        seed = seed if source.seed is None else source.seed
        self.loader = source.windows(
            session,
            seed=seed,
            drawn=source.drawn(seed, session.from_main),
            batch_size=source.batch_size,
            accumulation=self.accumulation,
            batches=None if own_step is None else self.accumulation,
        )
        arguments.gradient_accumulation_steps = self.loader.micro_batches  # as above
        return self.loader

    def get_train_sampler(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's sampler, as it would be in a run with all nodes."""
        accelerator = self._trainer.accelerator
        setattr(accelerator, FULL_RANKS, self._session.reference_world_size)
        try:
            return wrapped(*args, **kwargs)
        finally:
            delattr(accelerator, FULL_RANKS)

    def get_total_train_batch_size(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Return the global batch size."""
        if self.loader is None:
            return wrapped(*args, **kwargs)
        return self._trainer._train_batch_size * self.accumulation * self._session.reference_world_size  # noqa: SLF001

    def full_values(self, values: tuple[Any, ...], found: Any) -> tuple[Any, ...]:
        """Return the same with the steps of a run with all nodes, which must not depend on the present number."""
        left, arguments = self.left, self._trainer.args
        if left is None:
            return values
        epochs, steps_of_epoch, *rest, steps = values
        if found:
            steps = found["state"]["max_steps"]
        elif arguments.max_steps <= 0:
            steps = math.ceil(arguments.num_train_epochs * left.full_steps)
        if left.changes:
            # Where the ranks share an epoch unevenly it has some steps less: the training ends by the number of steps.
            epochs = max(epochs, math.ceil(steps / steps_of_epoch)) + 1
        return (epochs, steps_of_epoch, *rest, steps)


class LeftLoader:
    """A loader that transformers divides, from the run's position in the epoch on.

    Args:
        full: number of ranks of a run with all nodes
        accumulation: batches of a rank in a step of that run
        keep_count: whether the trainer counts on that number in a smaller run too

    Attributes:
        epoch: epoch of the current or next iteration
        trained: batches of it that all ranks together have trained
        accumulation: batches of a rank in a step
        changes: whether the run may have more ranks than this round
        closed: whether iterations yield nothing, because the training is complete
    """

    _is_accelerate_prepared = True  # accelerate would divide it once more

    def __init__(self, loader: Any, *, ranks: int, full: int, accumulation: int, keep_count: bool) -> None:
        self._loader = loader
        self._ranks = ranks
        self._full_step = accumulation * full
        self.changes = ranks != full
        # No sample is left out: where the ranks cannot share the batches of a step evenly, it has some more.
        self.accumulation = accumulation if keep_count else math.ceil(self._full_step / ranks)
        self.epoch = 0
        self.trained = 0
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader."""
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        """Return the number of this rank's batches of a whole epoch."""
        return len(self._loader)

    @property
    def full_steps(self) -> int:
        """Steps of an epoch of a run with all nodes."""
        return max(1, math.ceil(len(self._loader) * self._ranks / self._full_step))

    @property
    def ended(self) -> bool:
        """Whether the epoch is known to have no more batches."""
        try:
            return self.trained // self._ranks >= len(self._loader)
        except TypeError:  # without a length
            return False

    def begin_at(self, epoch: int, trained: int) -> None:
        """Set the position."""
        self.epoch, self.trained = epoch, trained

    def end_epoch(self) -> None:
        """Go on with the next epoch."""
        self.begin_at(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the trainer does not know the epoch of data without a length."""

    def count(self) -> None:
        """Count a batch of each rank as trained."""
        self.trained += self._ranks

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches from the position on."""
        if self.closed:
            return iter(())
        loader = self._loader
        inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for each in (loader, inner):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
        behind = self.trained // self._ranks
        self.trained = behind * self._ranks
        if behind and isinstance(loader, DataLoader):
            skip = importlib.import_module("accelerate.data_loader").skip_first_batches  # which transformers needs
            loader, behind = skip(loader, behind), 0
        return itertools.islice(iter(loader), behind, None)
