"""Wraps the functions of transformers on which the integration depends, when the script imports them.

The checkpoint folders that ``Trainer`` writes for people are complete, or not taken for a checkpoint: a folder holds a
marker while it is written, which has the name that transformers gives it for checkpoints on
SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from azureml_elastic.distributed.device import device_of
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.integrations.script_loop.state_folders import all_arrive, flush
from azureml_elastic.train.integrations.transformers.evaluation import evaluating
from azureml_elastic.train.integrations.transformers.training_loop import TrainingLoop, obstacle
from azureml_elastic.train.session.stack_session import stack_session

__all__ = ["INCOMPLETE", "attach_to_arguments", "attach_to_trainer", "attach_to_utilities", "newest", "save"]

INCOMPLETE = "checkpoint-is-incomplete.txt"

_NAME = re.compile(r"checkpoint-(\d+)")

_LOOP = "_azureml_elastic_loop"
"""Attribute of a trainer with the :class:`TrainingLoop` while it trains."""

Wrapped = Callable[..., Any]


def newest(folder: str) -> str | None:
    """Return the complete checkpoint folder of the highest step; see ``transformers.trainer_utils``.

    Raises:
        OSError: the folder cannot be listed.
    """
    found: list[tuple[int, str]] = []
    for name in os.listdir(folder):  # noqa: PTH208 - as the stack's function: a relative path stays one
        matched, path = _NAME.fullmatch(name), os.path.join(folder, name)  # noqa: PTH118
        if matched and Path(path).is_dir() and not Path(path, INCOMPLETE).exists():
            found.append((int(matched[1]), path))
    return max(found)[1] if found else None


def save(trainer: Any, write: Callable[[], Any]) -> Any:
    """Have a checkpoint folder of the current step written, marked as incomplete meanwhile. A collective."""
    folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}"  # noqa: SLF001
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / INCOMPLETE
        marker.write_text("This checkpoint is being written, or its writer has ended meanwhile.\n")
        flush(marker)
        flush(folder)
    all_arrive()
    result = write()
    all_arrive()
    if trainer.args.should_save:
        with contextlib.suppress(OSError):  # save_total_limit may have removed the folder
            for path in folder.rglob("*"):
                flush(path)
            (folder / INCOMPLETE).unlink()
            flush(folder)
    all_arrive()  # were the others to go on and rank 0 lost before this, nobody would write the folder again
    return result


def attach_to_arguments(module: ModuleType) -> None:
    """Attach to ``transformers.training_args``: the session opens the process group before the stack would."""

    def setup_devices(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        session = stack_session()
        if session is not None and not device_of(session.device).separate and not instance.deepspeed:
            instance.use_cpu = True  # without it the ranks of a machine without a GPU train apart
        return wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "TrainingArguments.__post_init__", setup_devices)


def attach_to_utilities(module: ModuleType) -> None:
    """Attach to ``transformers.trainer_utils``: folders that are not complete are no checkpoints."""
    wrap_function_wrapper(
        module,
        "get_last_checkpoint",
        lambda wrapped, instance, args, kwargs: newest(*args, **kwargs),
    )


def attach_to_trainer(module: ModuleType) -> None:
    """Attach to ``transformers.trainer``."""
    wrap = functools.partial(wrap_function_wrapper, module)
    wrap("Trainer.train", _train)
    wrap("Trainer.evaluation_loop", _evaluation_loop)
    wrap("Trainer.create_accelerator_and_postprocess", _create_accelerator)
    wrap("skip_first_batches", _skip_first_batches)
    wrap("deepspeed_load_checkpoint", _load_engine)
    wrap("Trainer._save_checkpoint", _save_checkpoint)
    for name in (
        "get_train_dataloader",
        "get_total_train_batch_size",
        "training_step",
        "set_initial_training_values",
        "_get_num_items_in_batch",
        "_maybe_log_save_evaluate",
        "_determine_best_metric",
    ):
        wrap(f"Trainer.{name}", _during_training(name.lstrip("_")))
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"):
        wrap(f"Trainer.{name}", _during_training("load"))


def _during_training(name: str) -> Callable[..., Any]:
    """Return a wrapper that calls a method of the training loop while there is one."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        loop = getattr(instance, _LOOP, None)
        return wrapped(*args, **kwargs) if loop is None else getattr(loop, name)(wrapped, *args, **kwargs)

    return wrapper


def _train(wrapped: Wrapped, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    session = stack_session()
    if session is None or obstacle(session, trainer, args, kwargs) is not None:
        return wrapped(*args, **kwargs)
    loop = TrainingLoop(session, trainer)
    setattr(trainer, _LOOP, loop)
    try:
        return loop.train(wrapped, *args, **kwargs)
    finally:
        delattr(trainer, _LOOP)


def _evaluation_loop(wrapped: Wrapped, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if stack_session() is None:
        return wrapped(*args, **kwargs)
    prepared = args[0] if args else kwargs.pop("dataloader")
    with evaluating(trainer, prepared) as loader:
        return wrapped(loader, *args[1:], **kwargs)


def _create_accelerator(wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    trainer.accelerator._azureml_elastic_apart = True  # the integration of accelerate leaves it alone  # noqa: SLF001
    return result


def _load_engine(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    if TrainingLoop.restores(args[1] if len(args) > 1 else kwargs.get("checkpoint_path")):
        return None
    return wrapped(*args, **kwargs)


def _skip_first_batches(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    loader = args[0] if args else kwargs.get("dataloader")
    return loader if isinstance(loader, WindowLoader) else wrapped(*args, **kwargs)


def _save_checkpoint(wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    if stack_session() is None:
        return wrapped(*args, **kwargs)
    return save(trainer, functools.partial(wrapped, *args, **kwargs))
