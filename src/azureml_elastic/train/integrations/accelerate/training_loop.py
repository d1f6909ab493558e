"""The loop of a script with accelerate within a run.

Weights, optimizers, schedulers and registered objects are tracked; see :mod:`..script_loop.loop` for what a restarted
script does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from azureml_elastic.train.integrations.nested import rebuilt, tensors_of
from azureml_elastic.train.integrations.script_loop import state_folders
from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop, Stack
from azureml_elastic.train.integrations.script_loop.own_schedulers import schedulers_of
from azureml_elastic.train.integrations.script_loop.state_folders import Place
from azureml_elastic.train.integrations.sources import Source, source_of
from azureml_elastic.train.integrations.wrapping import Wrapped
from azureml_elastic.train.session.stack_session import StackSession

_TOGETHER = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Kinds of training whose folders all ranks write: each has a part of the state."""

_NESTED = (torch.Tensor, Mapping, list, tuple)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A loader that the script has accelerate prepare.

    Args:
        divided: returns the same as accelerate divides it among the ranks, for passes that train nothing
        full: returns the same as accelerate would divide it in a run with all nodes, for its attributes
    """

    session: StackSession
    accelerator: Any
    loader: DataLoader[Any]
    divided: Callable[[], Any]
    full: Callable[[], Any]

    @cached_property
    def source(self) -> Source:
        """What it has, if that can be divided by index."""
        return source_of(self.loader, self.session.reference_world_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step."""
        size = self.source.batch_size * int(self.accelerator.gradient_accumulation_steps)
        return size if self.accelerator.split_batches else size * self.session.reference_world_size

    @property
    def batches_of_epoch(self) -> int:
        """Number of batches of a rank in an epoch of training data, at the reference world size."""
        size, length = self.global_batch_size, self.source.length
        steps = length // size if self.source.drop_last else -(-length // size)
        return int(steps * self.accelerator.gradient_accumulation_steps)


class TrainingLoop(Stack):
    """accelerate's part in a loop. The methods that take ``wrapped`` are called in place of its own.

    Attributes:
        loop: the script's loop
        loader: loader in place of the script's
    """

    unstepped = (
        "The optimizer has not stepped at the end of a global batch. A loop that accumulates gradients gives "
        "Accelerator(gradient_accumulation_steps=...) the number."
    )

    def __init__(self, prepared: Prepared) -> None:
        session, accelerator, source = prepared.session, prepared.accelerator, prepared.source
        accumulation, ranks = accelerator.gradient_accumulation_steps, session.reference_world_size
        own_size = -(-source.batch_size // ranks) if accelerator.split_batches else source.batch_size
        self.loop = ScriptLoop(session, self, accumulation=accumulation, batch_size=own_size)
        self._session = session
        self._accelerator = accelerator
        self._divided = prepared.divided
        self._tracked_models: set[int] = set()
        self._unfinished: tuple[Path, Place] | None = None  # that the script has loaded, and that is not complete
        seed = accelerator.dataloader_config.data_seed
        seed = source.seed_of(prepared.loader) if seed is None else seed
        self._drawn = source.drawn(seed, self._agree)
        windows = source.windows(
            session,
            seed=seed,
            drawn=self._drawn,
            batch_size=own_size,
            global_batch_size=prepared.global_batch_size,
            batches=accumulation,
        )
        self.loader = self.loop.loader_of(lambda: prepared.divided() if self.loader.left else prepared.full(), windows)
        self._scheduler_steps = 1 if accelerator.split_batches else ranks
        self._accumulated = False  # gradients of the current step
        self._weighed = False  # the loss to come, by the script
        # accelerate's wrapper of an engine steps within backward(), and that of its optimizer never does.
        self._steps_in_backward = accelerator.distributed_type.value == "DEEPSPEED"

    @override
    def objects(self) -> Mapping[str, Any]:
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

    @override
    def models(self) -> list[nn.Module]:
        return list(self._accelerator._models)  # noqa: SLF001

    @override
    def own_schedulers(self) -> list[Any]:
        optimizers = self._accelerator._optimizers  # noqa: SLF001
        known = [each.scheduler for each in self._accelerator._schedulers]  # noqa: SLF001
        return schedulers_of([*optimizers, *(each.optimizer for each in optimizers)], known)

    @override
    def plain_batches(self) -> Iterator[Any]:
        return iter(self._divided())

    def _agree(self, drawn: Any) -> Any:
        """Return rank 0's value, once all ranks train: before that a script may look at its data on some of them."""
        return self._session.from_main(drawn) if self.loop.begun else drawn

    @override
    def mark(self, *, last: bool) -> None:
        self._accelerator.gradient_state._set_sync_gradients(last)  # noqa: SLF001

    def leave(self) -> bool:
        """Leave the data to accelerate; return whether that was possible, before the script has trained them."""
        if not self.loop.begun:
            self.loader.left = True
            self._session.leave_data()
        return self.loader.left

    def tracks_models_of(self, accelerator: Any) -> bool:
        """Return whether all models of an accelerator are part of the state of the run."""
        return not self.loop.begun or set(map(id, accelerator._models)) <= self._tracked_models  # noqa: SLF001

    def weighs_by_ranks(self) -> bool:
        """Note that the script asks for the number of ranks, and return whether it does so for the loss to come.

        Its loss is then a sum over the samples, times that number, by a total over all ranks: data parallelism divides
        by the number. It is no mean over a rank's samples, and is weighed already.
        """
        batch = self.loop.training
        self._weighed = batch is not None and not (batch.stepped or batch.completed)
        return self._weighed

    def backward(self, wrapped: Wrapped, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weigh a micro-batch's loss of shape () so that the mean over the ranks is the mean over the samples."""
        batch = self.loop.steps.train_batch(loss)
        if self.loop.repeating:
            return None
        if batch is None:
            return wrapped(loss, *args, **kwargs)
        weight = batch.micro.weight * self._accelerator.gradient_accumulation_steps
        if not self._weighed or loss is batch.own_loss:  # that the model computes itself is a mean
            loss = loss * weight  # accelerate divides by the number of batches that the script accumulates
        elif weight != 1:
            self.loop.warn("accelerator.num_processes was read between a batch and its backward(): the loss is taken "
                           "for a sum over samples or tokens that the script weighs by that number. If it is a mean, "
                           "gradients are wrong where ranks have different numbers of samples, as with fewer nodes: "
                           "read the number before the loop.")  # fmt: skip
        self._accumulated, self._weighed = True, False
        result = wrapped(loss, *args, **kwargs)
        if batch.micro.last and self._steps_in_backward:
            batch.stepped, self._accumulated = True, False
        return result

    def optimizer_step(self, optimizer: object, step: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Note that an optimizer has stepped."""
        self.loop.steps.train_batch()  # whose loss may have gone backward without accelerate
        if self.loop.steps.repeat_update(optimizer):
            return None
        result, batch = step(*args, **kwargs), self.loop.training
        if batch is not None and batch.micro.last:
            if not self._accumulated and not batch.stepped:
                self.loop.warn("The optimizer steps without accelerator.backward(loss): the mean loss is not weighed "
                               "by samples. Call it in place of loss.backward().")  # fmt: skip
            self._accumulated = False
            self.loop.steps.note_update(optimizer, len(self._accelerator._optimizers))  # noqa: SLF001
        return result

    def zero_grad(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Drop gradients, but not those that the current step accumulates."""
        if self.loop.repeating:
            return None
        if self.loop.training is None:
            return wrapped(*args, **kwargs)
        # accelerate clears gradients at a step's last batch alone. A loop that clears them before each forward pass
        # would keep those of the step before, and then drop what this one has accumulated.
        if self._accumulated:
            return None
        self.mark(last=True)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.loop.synchronize()

    def scheduler_step(self, wrapped: Wrapped, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Advance a scheduler as at the reference world size, and only once where epochs are repeated."""
        if self.loop.repeats or self.loop.repeating:
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
        return None if self.loop.repeating else wrapped(*args, **kwargs)

    @property
    @override
    def evaluates(self) -> bool:
        return self._accelerator.gradient_state.active_dataloader is not None

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
        noted = not (self.loop.steps.within_call or self.evaluates)

        def call_and_note() -> Any:
            result = call()
            for each in tensors_of(result) if noted else ():
                self.loop.steps.note_result(each)
            return result

        return self.loop.steps.call(call_and_note, lambda: self._answer(value, unknown))

    def _answer(self, value: Any, unknown: Callable[[Any], Any]) -> Any:
        if isinstance(value, Mapping):
            return rebuilt(value, {key: self._answer(each, unknown) for key, each in value.items()})
        if isinstance(value, (list, tuple)) and any(isinstance(each, _NESTED) for each in value):
            return rebuilt(value, [self._answer(each, unknown) for each in value])
        known = self.loop.steps.results.next() if isinstance(value, torch.Tensor) else None
        return unknown(value) if known is None else known.to(value.device)

    def _repeated_gather(self, value: Any) -> Any:
        """Return what gathering equal shares of a batch, (rows, ...), from all ranks returns: (ranks * rows, ...)."""
        times = self._session.world_size
        if isinstance(value, torch.Tensor):
            return torch.cat([value if value.dim() else value.reshape(1)] * times)
        return value * times if isinstance(value, (list, tuple)) else value

    def pad_across_processes(self, wrapped: Wrapped, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad values to the longest of all ranks, likewise."""
        return self.loop.steps.call(partial(wrapped, value, *args, **kwargs), lambda: value)

    def wait_for_everyone(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Wait for all ranks."""
        return self.loop.steps.call(partial(wrapped, *args, **kwargs), lambda: None)

    def end_training(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Finish the session before accelerate closes the process group."""
        self._session.finish_before_end()
        return wrapped(*args, **kwargs)

    def save_state(self, wrapped: Wrapped, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save a folder with the position in the data.

        Under data parallelism accelerate needs no other rank for that, and scripts may save on the main process alone.
        """
        write, steps, folders = partial(wrapped, output_dir, *args, **kwargs), self.loop.steps, self.loop.folders
        if self._names_folders:
            save_next = partial(steps.within, partial(self._save_next, write))
            return steps.call(save_next, save_next)
        if output_dir is None:
            return wrapped(output_dir, *args, **kwargs)
        together = self._accelerator.distributed_type.value in _TOGETHER
        # Folders on a disk of each node have the mark of rank 0 on its own alone.
        make = self._session.is_main or not self._accelerator.project_configuration.save_on_each_node
        folder = Path(output_dir).expanduser()

        def save() -> Any:
            here = folders.here
            return steps.within(lambda: folders.save(folder, here, write, together=together, make=make))

        if together:
            return steps.call(save, save)
        if not steps.answers_alone:
            steps.complete_updates()
        return save()

    @property
    def _names_folders(self) -> bool:
        """Whether accelerate numbers the folders by itself, for which it waits for all ranks."""
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    def _save_next(self, write: Callable[[], Any]) -> Any:
        accelerator = self._accelerator
        folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        if self.loop.silent:
            if self.loop.folders.is_saved(folder):
                accelerator.project_configuration.iteration += 1  # as the folder's own call would
                return None
            state_folders.remove(folder, is_main=self._session.is_main)  # accelerate writes no folder that exists
        return state_folders.save(folder, self.loop.folders.here, write, rank=self._session.rank)

    def load_state(self, wrapped: Wrapped, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a folder where it is further than the state of the run, and take over its position.

        Raises:
            ValueError: the folder is not complete, and further than the state of the run.
        """
        folder = self._newest() if input_dir is None else Path(input_dir).expanduser()
        hooks = self._accelerator._load_model_state_pre_hook  # noqa: SLF001 - of averages, for instance
        folders = self.loop.folders
        result = folders.load(folder, partial(wrapped, input_dir, *args, **kwargs), holds_more=bool(hooks))
        if folder is not None and folders.place is not None and not folders.place.complete:
            self._unfinished = folder, folders.place
        return result

    def _newest(self) -> Path | None:
        if not self._names_folders:
            return None
        numbered = Path(self._accelerator.project_dir, "checkpoints").glob("checkpoint_*")
        return max(numbered, key=lambda path: int(path.name.rpartition("_")[2]), default=None)

    @override
    def restored(self) -> None:
        if self._drawn is not None:
            self._drawn.agree()
        self._tracked_models = set(map(id, self.models()))
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None and unfinished[1].steps == self._session.steps:
            self._accelerator.save_state(str(unfinished[0]))  # whose writing the end of a process has cut short
