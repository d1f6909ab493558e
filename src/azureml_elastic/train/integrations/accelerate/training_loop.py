"""The loop of a script with accelerate within a run.

A restarted script runs from its beginning: its iterations over the training data count the epochs, and those that are
trained have no batches left. Weights, optimizers, schedulers and registered objects are restored by the session when
the first iteration begins. A script that continues from a folder of its own, which is older than that state, repeats
the steps in between without training, so that its counters are right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from azureml_elastic.train.data.loader import to_device
from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.integrations.accelerate import state_folders
from azureml_elastic.train.integrations.accelerate.epoch_loader import EpochLoader
from azureml_elastic.train.integrations.accelerate.progress import Progress
from azureml_elastic.train.integrations.accelerate.state_folders import Place
from azureml_elastic.train.integrations.stack_session import StackSession
from azureml_elastic.train.integrations.window_loader import loader_options

__all__ = ["TrainingLoop"]

_LOG = logging.getLogger(__name__)

_PROGRESS = "accelerate"

Wrapped = Callable[..., Any]


class TrainingLoop:
    """The integration's part in a loop. The methods that take ``wrapped`` are called in place of accelerate's.

    Args:
        session: session
        accelerator: the script's ``Accelerator``
        loader: the script's loader of training data

    Attributes:
        loader: loader in place of the script's
        repeats: whether the script repeats an epoch that is trained, without training
    """

    def __init__(self, session: StackSession, accelerator: Any, loader: DataLoader[Any]) -> None:
        self._session = session
        self._accelerator = accelerator
        accumulation, size = accelerator.gradient_accumulation_steps, loader.batch_size
        assert size is not None
        split = accelerator.split_batches
        seed = accelerator.dataloader_config.data_seed
        generator = getattr(loader.sampler, "generator", None)
        if seed is None:
            seed = 0 if generator is None else generator.initial_seed()
        self._windows = session.windows(
            loader.dataset,
            batch_size=-(-size // session.reference_world_size) if split else size,
            global_batch_size=size * accumulation * (1 if split else session.reference_world_size),
            multiple=accumulation,
            seed=seed,
            drop_last=loader.drop_last,
            **loader_options(loader),
        )
        steps = len(self._windows) // self._windows.micro_batches
        self.loader = EpochLoader(loader, steps * accumulation, self._epoch, self._expect)
        self.repeats = False
        self._steps_per_epoch = steps
        self._scheduler_steps = 1 if split else session.reference_world_size
        self._begun = False
        self._next_epoch = 0
        self._found: Mapping[str, Any] | None = None
        self._searched = False
        self._place: Place | None = None  # of the folder that the script has loaded
        self._reload: Callable[[], Any] | None = None
        self._behind = 0  # steps that are trained already, and that the script is about to count
        self._first_window = 0
        self._repeated: int | None = None  # batches of those that were yielded
        self._micro: MicroBatch | None = None
        self._accumulated = False  # gradients of the current step
        self._stepped = False
        self._completed = False
        self._warned: set[str] = set()

    # --- data --------------------------------------------------------------------------------------------------------

    def _expect(self, epoch: int) -> None:
        self._next_epoch = max(self._next_epoch, epoch)

    def _epoch(self) -> Iterator[Any]:
        """Yield the batches of the script's next epoch that are not trained yet."""
        session, first = self._session, not self._begun
        if first:
            self._begin()
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        while session.epoch < epoch:
            if first:  # the script believes to be further than the state of the run
                yield from self._rest()
            session.end_epoch()
        count = min(self._behind, self._steps_per_epoch - self._first_window)
        self._behind, self._first_window = self._behind - count, 0
        if count:
            yield from self._repeat(count)
        self.repeats = session.epoch > epoch
        if not self.repeats:
            yield from self._rest()

    def _repeat(self, count: int) -> Iterator[Any]:
        """Yield batches for steps that are trained already."""
        session, accumulation = self._session, self._accelerator.gradient_accumulation_steps
        session.begin_repeated_steps()
        try:
            for index in range(count * accumulation):
                self._repeated = index + 1
                self.synchronize()
                yield to_device(self._windows.filler(), session.device)
        finally:
            self._repeated = None
            session.end_repeated_steps()
            self._accelerator.gradient_state._set_sync_gradients(True)  # noqa: SLF001

    def _rest(self) -> Iterator[Any]:
        """Yield the rest of the session's epoch."""
        if self._session.epoch_ending:
            return
        try:
            for batch in self._windows:
                self._micro, self._completed = self._windows.untrained.popleft(), False
                self.synchronize()
                try:
                    yield batch
                except GeneratorExit:  # the script has left the loop
                    if self._stepped:
                        self._complete()
                    raise
                if self._micro.last:
                    self._complete()
        finally:
            self._micro = None
            self._accelerator.gradient_state._set_sync_gradients(True)  # noqa: SLF001

    def _begin(self) -> None:
        """Restore the state of the run."""
        self._begun = True
        accelerator = self._accelerator
        kinds = {
            "model": accelerator._models,  # noqa: SLF001
            "optimizer": [each.optimizer for each in accelerator._optimizers],  # noqa: SLF001
            "scheduler": [each.scheduler for each in accelerator._schedulers],  # noqa: SLF001
            "object": accelerator._custom_objects,  # noqa: SLF001
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        }
        objects = {
            f"{kind}_{index}" if index else kind: each
            for kind, found in kinds.items()
            for index, each in enumerate(found)
        }
        self._session.adopt({**objects, _PROGRESS: Progress(self._session)})
        if self._reload is None:
            self._behind = 0 if self._place is None else max(0, self._session.steps - self._place.steps)
            self._first_window = 0 if self._place is None else self._place.windows
            return
        place, load = self._place, self._reload
        if self._found is not None:
            load()  # the folder has more steps than the state that the session has restored
        if place is not None:
            self._session.begin_at(place.steps, place.epoch, place.windows)

    # --- steps -------------------------------------------------------------------------------------------------------

    def synchronize(self) -> bool:
        """Tell accelerate whether the current micro-batch completes a step; return whether there is one."""
        if self._repeated is not None:
            last = self._repeated % self._accelerator.gradient_accumulation_steps == 0
            self._accelerator.gradient_state._set_sync_gradients(last)  # noqa: SLF001
            return True
        if self._micro is None:
            return False
        self._accelerator.gradient_state._set_sync_gradients(self._micro.last)  # noqa: SLF001
        return True

    def backward(self, wrapped: Wrapped, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weigh a micro-batch's loss so that the mean over the ranks is the mean over the samples."""
        if self._repeated is not None:
            return None
        if self._micro is not None:
            self._session.observe(loss)
            self._accumulated = True
            # accelerate divides by the number of batches that the script accumulates
            loss = loss * (self._micro.weight * self._accelerator.gradient_accumulation_steps)
        return wrapped(loss, *args, **kwargs)

    def optimizer_step(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Note that the optimizer has stepped."""
        if self._repeated is not None:
            return None
        result = wrapped(*args, **kwargs)
        if self._micro is not None and self._micro.last:
            if not self._accumulated and not self._stepped:
                self._warn("The optimizer steps without accelerator.backward(loss): the mean loss is not weighed by "
                           "samples. Call it in place of loss.backward().")  # fmt: skip
            self._stepped, self._accumulated = True, False
        return result

    def zero_grad(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Drop gradients, but not those that the current step accumulates."""
        if self._micro is None:
            return wrapped(*args, **kwargs)
        if self._accumulated:
            return None
        self._accelerator.gradient_state._set_sync_gradients(True)  # noqa: SLF001
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.synchronize()

    def scheduler_step(self, wrapped: Wrapped, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Advance a scheduler as at the reference world size, and only once where epochs are repeated."""
        if self.repeats or self._repeated is not None:
            return None
        if self._micro is None or not scheduler.step_with_optimizer or not scheduler.gradient_state.sync_gradients:
            return wrapped(*args, **kwargs)
        if any(optimizer.step_was_skipped for optimizer in scheduler.optimizers):
            return None
        inner = scheduler.scheduler
        for _ in range(self._scheduler_steps):
            if not hasattr(inner, "total_steps") or inner._step_count <= inner.total_steps:  # noqa: SLF001
                inner.step(*args, **kwargs)
        return None

    def complete_step(self) -> None:
        """Count the step if the optimizer has stepped: what follows may fail because a peer is lost."""
        if self._stepped:
            self._complete()

    def _complete(self) -> None:
        if self._completed or self._micro is None:
            return
        if not self._stepped:
            self._warn("The optimizer has not stepped at the end of a global batch. A loop that accumulates gradients "
                       "gives Accelerator(gradient_accumulation_steps=...) the number.")  # fmt: skip
        self._completed, self._stepped = True, False
        self._session.complete_step(changes_state=self._micro.window.ends_epoch)

    def _warn(self, text: str) -> None:
        if text not in self._warned and self._session.is_main:
            self._warned.add(text)
            _LOG.warning("%s", text)

    # --- folders -----------------------------------------------------------------------------------------------------

    def save_state(self, wrapped: Wrapped, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save a folder with the position in the data."""
        self.complete_step()
        accelerator, session = self._accelerator, self._session
        write = partial(wrapped, output_dir, *args, **kwargs)
        if accelerator.project_configuration.automatic_checkpoint_naming:
            folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        elif output_dir is None:
            return write()
        else:
            folder = Path(output_dir).expanduser()
            if session.is_main:
                folder.mkdir(parents=True, exist_ok=True)
        saved = state_folders.read(folder)
        if self._repeated is not None or (self.repeats and saved is not None and saved.complete):
            return None  # the state is that of a later step
        return state_folders.save(folder, Place(session.steps, *session.place), write, is_main=session.is_main)

    def load_state(self, wrapped: Wrapped, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a folder where it is further than the state of the run, and take over its position.

        Raises:
            ValueError: the folder is not complete, and the run has no state of its own.
        """
        load = partial(wrapped, input_dir, *args, **kwargs)
        if self._begun:
            return load()
        if not self._searched:
            self._found, self._searched = self._session.find(_PROGRESS), True
        place = None if input_dir is None else state_folders.read(Path(input_dir).expanduser())
        self._place = place
        if place is not None:
            self._next_epoch = place.epoch
        if self._found is not None and (place is None or place.steps <= self._found["steps"]):
            return None
        if place is not None and not place.complete:
            if self._found is None:
                raise ValueError(
                    f"{input_dir} is not complete: the process that wrote it ended meanwhile. Load the folder before "
                    "it, or start anew without load_state()."
                )
            return None
        self._reload = load
        return load()
