"""Wraps the functions of transformers on which the integration depends, when the script imports them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from azureml_elastic.distributed.device import device_of
from azureml_elastic.train.data.window_loader import WindowLoader
from azureml_elastic.train.integrations.transformers import checkpoint_folders
from azureml_elastic.train.integrations.transformers.evaluation import evaluating
from azureml_elastic.train.integrations.transformers.training_loop import TrainingLoop, obstacle
from azureml_elastic.train.session.stack_session import stack_session

__all__ = ["attach_to_arguments", "attach_to_trainer", "attach_to_utilities"]

_LOOP = "_azureml_elastic_loop"
"""Attribute of a trainer with the :class:`TrainingLoop` while it trains."""

Wrapped = Callable[..., Any]


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
        lambda wrapped, instance, args, kwargs: checkpoint_folders.newest(*args, **kwargs),
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
    return checkpoint_folders.save(trainer, functools.partial(wrapped, *args, **kwargs))
