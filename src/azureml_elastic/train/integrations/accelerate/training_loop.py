"""The loop of a script with accelerate within a run.

Weights, optimizers, schedulers and registered objects are tracked; see :mod:`..script_loop.loop` for what a restarted
script does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop
from azureml_elastic.train.integrations.stack_session import StackSession
from azureml_elastic.train.integrations.window_loader import loader_options

__all__ = ["TrainingLoop"]

Wrapped = Callable[..., Any]


class TrainingLoop(ScriptLoop):
    """The integration's part in a loop. The methods that take ``wrapped`` are called in place of accelerate's.

    Args:
        session: session
        accelerator: the script's ``Accelerator``
        loader: the script's loader of training data

    Attributes:
        loader: loader in place of the script's
    """

    unstepped = (
        "The optimizer has not stepped at the end of a global batch. A loop that accumulates gradients gives "
        "Accelerator(gradient_accumulation_steps=...) the number."
    )

    def __init__(self, session: StackSession, accelerator: Any, loader: DataLoader[Any]) -> None:
        super().__init__(session, accelerator.gradient_accumulation_steps)
        self._accelerator = accelerator
        accumulation, size = self._accumulation, loader.batch_size
        assert size is not None
        split = accelerator.split_batches
        seed = accelerator.dataloader_config.data_seed
        generator = getattr(loader.sampler, "generator", None)
        if seed is None:
            seed = 0 if generator is None else generator.initial_seed()
        windows = session.windows(
            loader.dataset,
            batch_size=-(-size // session.reference_world_size) if split else size,
            global_batch_size=size * accumulation * (1 if split else session.reference_world_size),
            multiple=accumulation,
            seed=seed,
            drop_last=loader.drop_last,
            **loader_options(loader),
        )
        self.loader = self._loader_of(loader, windows)
        self._scheduler_steps = 1 if split else session.reference_world_size
        self._accumulated = False  # gradients of the current step
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

    def _mark(self, *, last: bool) -> None:
        self._accelerator.gradient_state._set_sync_gradients(last)  # noqa: SLF001

    # --- steps -------------------------------------------------------------------------------------------------------

    def backward(self, wrapped: Wrapped, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weigh a micro-batch's loss so that the mean over the ranks is the mean over the samples."""
        self._used = True
        if self.repeating:
            return None
        if self._micro is not None:
            self._session.observe(loss)
            self._accumulated = True
            # accelerate divides by the number of batches that the script accumulates
            loss = loss * (self._micro.weight * self._accelerator.gradient_accumulation_steps)
        result = wrapped(loss, *args, **kwargs)
        if self._micro is not None and self._micro.last and self._steps_in_backward:
            self._stepped, self._accumulated = True, False
        return result

    def optimizer_step(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Note that the optimizer has stepped."""
        if self.repeating:
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
        self._mark(last=True)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.synchronize()

    def scheduler_step(self, wrapped: Wrapped, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Advance a scheduler as at the reference world size, and only once where epochs are repeated."""
        if self.repeats or self.repeating:
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
        return self._save(folder, self._here, write)

    def load_state(self, wrapped: Wrapped, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a folder where it is further than the state of the run, and take over its position.

        Raises:
            ValueError: the folder is not complete, and the run has no state of its own.
        """
        folder = None if input_dir is None else Path(input_dir).expanduser()
        return self._load(folder, partial(wrapped, input_dir, *args, **kwargs))
