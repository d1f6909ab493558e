"""The loop of a script with accelerate within a run.

Weights, optimizers, schedulers and registered objects are tracked; see :mod:`..script_loop.loop` for what a restarted
script does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from azureml_elastic.train.data.drawn_order import DrawnOrder
from azureml_elastic.train.integrations.nested import rebuilt, tensors_of
from azureml_elastic.train.integrations.script_loop import state_folders
from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop
from azureml_elastic.train.integrations.script_loop.own_schedulers import schedulers_of
from azureml_elastic.train.integrations.sources import Source
from azureml_elastic.train.integrations.wrapping import Wrapped
from azureml_elastic.train.session.stack_session import StackSession

_TOGETHER = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Kinds of training whose folders all ranks write: each has a part of the state."""

_NESTED = (torch.Tensor, Mapping, list, tuple)


class TrainingLoop(ScriptLoop):
    """The integration's part in a loop. The methods that take ``wrapped`` are called in place of accelerate's.

    Args:
        loader: the script's loader
        source: what it trains
        divided: returns the same as accelerate divides it among the ranks, for passes that train nothing
        full: returns the same as accelerate would divide it in a run with all nodes, for its attributes

    Attributes:
        loader: loader in place of the script's
    """

    unstepped = (
        "The optimizer has not stepped at the end of a global batch. A loop that accumulates gradients gives "
        "Accelerator(gradient_accumulation_steps=...) the number."
    )

    def __init__(
        self,
        session: StackSession,
        accelerator: Any,
        loader: DataLoader[Any],
        source: Source,
        divided: Callable[[], Any],
        full: Callable[[], Any],
    ) -> None:
        accumulation, size = accelerator.gradient_accumulation_steps, source.batch_size
        own_size = -(-size // session.reference_world_size) if accelerator.split_batches else size
        super().__init__(session, accumulation, own_size)
        self._accelerator = accelerator
        self._divided = divided
        self._left = False
        self._tracked_models: set[int] = set()
        self._unfinished: Path | None = None  # folder that the script has loaded and that is not complete
        seed = accelerator.dataloader_config.data_seed
        generator = getattr(getattr(loader.batch_sampler, "sampler", None), "generator", None)
        if seed is None:
            seed = source.seed or (0 if generator is None else generator.initial_seed())
        self._drawn: DrawnOrder | None = None
        if source.sampler is not None:
            self._drawn = DrawnOrder(source.sampler, whole_batches=source.whole_batches, seed=seed, agree=self._agree)
        windows = session.windows(
            source.dataset,
            batch_size=own_size,
            global_batch_size=_global_batch_size(session, accelerator, source),
            batches=accumulation,
            seed=seed,
            shuffle=source.shuffle,
            drop_last=source.drop_last,
            drawn=self._drawn,
            **source.options,
        )
        self.loader = self._loader_of(lambda: divided() if self._left else full(), windows)
        self._scheduler_steps = 1 if accelerator.split_batches else session.reference_world_size
        self._accumulated = False  # gradients of the current step
        self._weighed = False  # the loss to come, by the script
        # accelerate's wrapper of an engine steps within backward(), and that of its optimizer never does.
        self._steps_in_backward = accelerator.distributed_type.value == "DEEPSPEED"

    def _objects(self) -> Mapping[str, Any]:
        accelerator = self._accelerator
        kinds = {
            "model": accelerator._models,  # noqa: SLF001
            "optimizer": [each.optimizer for each in accelerator._optimizers],  # noqa: SLF001
            "scheduler": [each.scheduler for each in accelerator._schedulers],  # noqa: SLF001
            "object": accelerator._custom_objects,  # noqa: SLF001
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        }
        return {
            f"{kind}_{index}" if index else kind: each
            for kind, found in kinds.items()
            for index, each in enumerate(found)
        }

    def _models(self) -> list[nn.Module]:
        return list(self._accelerator._models)  # noqa: SLF001

    def _own_schedulers(self) -> list[Any]:
        optimizers = self._accelerator._optimizers  # noqa: SLF001
        known = [each.scheduler for each in self._accelerator._schedulers]  # noqa: SLF001
        return schedulers_of([*optimizers, *(each.optimizer for each in optimizers)], known)

    def _plain_batches(self) -> Iterator[Any]:
        return iter(self._divided())

    def _agree(self, drawn: Any) -> Any:
        """Return rank 0's value, once all ranks train: before that a script may look at its data on some of them."""
        return self._session.from_main(drawn) if self._begun else drawn

    def leave(self) -> bool:
        """Leave the data to accelerate; return whether that was possible, before the script has trained them."""
        if self._begun:
            return False
        self._left = True
        self._session.leave_data()
        return True

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch: at the reference world size, unless accelerate divides them."""
        return len(self._divided()) if self._left else super().batches_per_epoch

    def batches(self) -> Iterator[Any]:
        """Yield the batches of a pass over the training data."""
        return self._plain_batches() if self._left else super().batches()

    def _mark(self, *, last: bool) -> None:
        self._accelerator.gradient_state._set_sync_gradients(last)  # noqa: SLF001

    def tracks_models_of(self, accelerator: Any) -> bool:
        """Return whether all models of an accelerator are part of the state of the run."""
        return not self._begun or set(map(id, accelerator._models)) <= self._tracked_models  # noqa: SLF001

    @property
    def has_batch(self) -> bool:
        """Whether the current batch is one of the training data, or stands for one."""
        return self._micro is not None or self._repeated is not None

    # --- steps -------------------------------------------------------------------------------------------------------

    def weighs_by_ranks(self) -> bool:
        """Note that the script asks for the number of ranks, and return whether it does so for the loss to come.

        Its loss is then a sum over the samples, times that number, by a total over all ranks: data parallelism divides
        by the number. It is no mean over a rank's samples, and is weighed already.
        """
        self._weighed = self._micro is not None and not (self._stepped or self._completed or self.repeating)
        return self._weighed

    def backward(self, wrapped: Wrapped, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weigh a micro-batch's loss so that the mean over the ranks is the mean over the samples."""
        self._train_batch()
        if self.repeating:
            return None
        if self._micro is not None:
            self._note_loss(loss)
            self._accumulated = True
            weight = self._micro.weight * self._accelerator.gradient_accumulation_steps
            if not self._weighed or loss is self._own_loss:  # that the model computes itself is a mean
                loss = loss * weight  # accelerate divides by the number of batches that the script accumulates
            elif weight != 1:
                self._warn("accelerator.num_processes was read between a batch and its backward(): the loss is taken "
                           "for a sum over samples or tokens that the script weighs by that number. If it is a mean, "
                           "gradients are wrong where ranks have different numbers of samples, as with fewer nodes: "
                           "read the number before the loop.")  # fmt: skip
            self._weighed = False
        result = wrapped(loss, *args, **kwargs)
        if self._micro is not None and self._micro.last and self._steps_in_backward:
            self._stepped, self._accumulated = True, False
        return result

    def optimizer_step(self, optimizer: object, step: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Note that an optimizer has stepped."""
        if self.repeating:
            self._updates.expect(optimizer)
            self._repeat_update()
            return None
        result = step(*args, **kwargs)
        if self._micro is not None and self._micro.last:
            if not self._accumulated and not self._stepped:
                self._warn("The optimizer steps without accelerator.backward(loss): the mean loss is not weighed by "
                           "samples. Call it in place of loss.backward().")  # fmt: skip
            self._stepped, self._accumulated = True, False
            self._updates.note(optimizer, len(self._accelerator._optimizers))  # noqa: SLF001
        return result

    def zero_grad(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Drop gradients, but not those that the current step accumulates."""
        if self.repeating:
            return None
        if self._micro is None:
            return wrapped(*args, **kwargs)
        # accelerate clears gradients at a step's last batch alone. A loop that clears them before each forward pass
        # would keep those of the step before, and then drop what this one has accumulated.
        if self._accumulated:
            return None
        self._mark(last=True)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.synchronize()

    def scheduler_step(self, wrapped: Wrapped, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Advance a scheduler as at the reference world size, and only once where epochs are repeated."""
        if self.repeats or self.repeating:
            return None
        if not scheduler.step_with_optimizer or not scheduler.gradient_state.sync_gradients:
            return wrapped(*args, **kwargs)
        if any(optimizer.step_was_skipped for optimizer in scheduler.optimizers):
            return None
        inner = scheduler.scheduler  # from here as AcceleratedScheduler.step, which takes the present number of ranks
        for _ in range(self._scheduler_steps):
            if not hasattr(inner, "total_steps") or inner._step_count <= inner.total_steps:  # noqa: SLF001
                inner.step(*args, **kwargs)
        return None

    def clip_grad_value_(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Limit gradients; torch fails where there are none."""
        return None if self.repeating else wrapped(*args, **kwargs)

    # --- the script's other calls -------------------------------------------------------------------------------------

    @property
    def silent(self) -> bool:
        """Whether what the script prints and logs was printed and logged when its steps were trained."""
        return self._repeated is not None or self.repeats

    @property
    def _answers_alone(self) -> bool:
        """Whether no rank waits for another: in repeated steps, but not in an evaluation between two of them."""
        return (self.repeating or self._finishing) and not self._evaluates

    @property
    def _evaluates(self) -> bool:
        return self._accelerator.gradient_state.active_dataloader is not None

    def _call(self, call: Callable[[], Any], alone: Callable[[], Any]) -> Any:
        """Make a call that waits for other ranks, or answer it alone.

        The step counts before, if its updates are complete: the call fails where a peer is lost. What the script does
        after it is then left to the next process, which repeats the step silently up to this call.
        """
        if self._in_call:  # accelerate gathers metrics by its own gather(), and saves folders with barriers
            return call()
        self._come_to_call(counts=not self._evaluates)
        if self._answers_alone:
            return alone()
        if not self._updates.missing:  # else the call stands between two updates of the step
            self.complete_step()
        result = self._within(call)
        self._session.stands_at = None  # not where the call has failed
        return result

    def _within(self, call: Callable[[], Any]) -> Any:
        """Make a call whose own calls are accelerate's alone."""
        self._in_call = True
        try:
            return call()
        finally:
            self._in_call = False

    def gather(self, wrapped: Wrapped, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather values from all ranks; repeated steps, which each takes alone, have the values of that time."""
        return self._collective(partial(wrapped, value, *args, **kwargs), value, self._repeated_gather)

    def reduce(self, wrapped: Wrapped, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce values of all ranks, likewise."""
        sums = (args[0] if args else kwargs.get("reduction", "sum")) == "sum"
        ranks = self._session.world_size if sums else 1
        return self._collective(partial(wrapped, value, *args, **kwargs), value, lambda each: each * ranks)

    def _collective(self, call: Callable[[], Any], value: Any, unknown: Callable[[Any], Any]) -> Any:
        """Call a collective, or return what it has returned when the step was trained.

        Args:
            unknown: makes the result of equal values on all ranks, where it is not known
        """
        # Those of evaluations are not answered: a script computes them again, and may not have as many.
        noted = not (self._in_call or self._evaluates)

        def call_and_note() -> Any:
            result = call()
            for each in tensors_of(result) if noted else ():
                self._note_result(each)
            return result

        return self._call(call_and_note, lambda: self._answer(value, unknown))

    def _answer(self, value: Any, unknown: Callable[[Any], Any]) -> Any:
        if isinstance(value, Mapping):
            return rebuilt(value, {key: self._answer(each, unknown) for key, each in value.items()})
        if isinstance(value, (list, tuple)) and any(isinstance(each, _NESTED) for each in value):
            return rebuilt(value, [self._answer(each, unknown) for each in value])
        known = self._results.next() if isinstance(value, torch.Tensor) else None
        return unknown(value) if known is None else known.to(value.device)

    def _repeated_gather(self, value: Any) -> Any:
        """Return what a gathering of equal values from all ranks returns: a repeated batch is a share of this round."""
        times = self._session.world_size
        if isinstance(value, torch.Tensor):
            return torch.cat([value if value.dim() else value.reshape(1)] * times)
        return value * times if isinstance(value, (list, tuple)) else value

    def pad_across_processes(self, wrapped: Wrapped, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad values to the longest of all ranks, likewise."""
        return self._call(partial(wrapped, value, *args, **kwargs), lambda: value)

    def wait_for_everyone(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Wait for all ranks."""
        return self._call(partial(wrapped, *args, **kwargs), lambda: None)

    def end_training(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Finish the session before accelerate closes the process group."""
        self._session.finish_before_end()
        return wrapped(*args, **kwargs)

    # --- folders -----------------------------------------------------------------------------------------------------

    def save_state(self, wrapped: Wrapped, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save a folder with the position in the data.

        Under data parallelism accelerate needs no other rank for that, and scripts may save on the main process alone.
        """
        write = partial(wrapped, output_dir, *args, **kwargs)
        if self._names_folders:
            save_next = partial(self._within, partial(self._save_next, write))
            return self._call(save_next, save_next)
        if output_dir is None:
            return wrapped(output_dir, *args, **kwargs)
        together = self._accelerator.distributed_type.value in _TOGETHER
        # Folders on a disk of each node have the mark of rank 0 on its own alone.
        make = self._session.is_main or not self._accelerator.project_configuration.save_on_each_node
        folder = Path(output_dir).expanduser()

        def save() -> Any:
            return self._within(lambda: self._save(folder, self._here, write, together=together, make=make))

        if together:
            return self._call(save, save)
        if not (self._answers_alone or self._updates.missing):
            self.complete_step()
        return save()

    @property
    def _names_folders(self) -> bool:
        """Whether accelerate numbers the folders by itself, for which it waits for all ranks."""
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    def _save_next(self, write: Callable[[], Any]) -> Any:
        accelerator = self._accelerator
        folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        if self.silent:
            if self._is_saved(folder):
                accelerator.project_configuration.iteration += 1  # as the folder's own call would
                return None
            state_folders.remove(folder, is_main=self._session.is_main)  # accelerate writes no folder that exists
        return state_folders.save(folder, self._here, write, rank=self._session.rank)

    def load_state(self, wrapped: Wrapped, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a folder where it is further than the state of the run, and take over its position.

        Raises:
            ValueError: the folder is not complete, and further than the state of the run.
        """
        folder = self._newest() if input_dir is None else Path(input_dir).expanduser()
        hooks = self._accelerator._load_model_state_pre_hook  # noqa: SLF001 - of averages, for instance
        result = self._load(folder, partial(wrapped, input_dir, *args, **kwargs), holds_more=bool(hooks))
        if self._place is not None and not self._place.complete:
            self._unfinished = folder
        return result

    def _newest(self) -> Path | None:
        """Return the folder that accelerate loads where the script names none."""
        if not self._names_folders:
            return None
        numbered = Path(self._accelerator.project_dir, "checkpoints").glob("checkpoint_*")
        return max(numbered, key=lambda path: int(path.name.rpartition("_")[2]), default=None)

    def _begin(self) -> None:
        """Restore the state of the run, and write the folder whose writing the end of a process has cut short."""
        super()._begin()
        if self._drawn is not None:
            self._drawn.agree()
        self._tracked_models = set(map(id, self._models()))
        folder, self._unfinished = self._unfinished, None
        if folder is not None and self._place is not None and self._place.steps == self._session.steps:
            self._accelerator.save_state(str(folder))


def batches_of_epoch(session: StackSession, accelerator: Any, source: Source) -> int:
    """Return the number of batches of a rank in an epoch of training data, at the reference world size."""
    size = _global_batch_size(session, accelerator, source)
    steps = source.length // size if source.drop_last else -(-source.length // size)
    return int(steps * accelerator.gradient_accumulation_steps)


def _global_batch_size(session: StackSession, accelerator: Any, source: Source) -> int:
    size = source.batch_size * int(accelerator.gradient_accumulation_steps)
    return size if accelerator.split_batches else size * session.reference_world_size
