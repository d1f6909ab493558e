"""Wraps the functions of accelerate on which the integration depends, when the script imports them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader
from wrapt import wrap_function_wrapper

from azureml_elastic.distributed.device import device_of
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.train.integrations.accelerate.training_data import SequentialLoader, TrainingData, fit_to_round
from azureml_elastic.train.integrations.deepspeed.other_stacks import preparing
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader
from azureml_elastic.train.session.stack_session import stack_session

__all__ = [
    "attach_to_accelerator",
    "attach_to_data_loader",
    "attach_to_local_sgd",
    "attach_to_logging",
    "attach_to_optimizer",
    "attach_to_parallelism",
    "attach_to_scheduler",
    "attach_to_state",
]

_APART = "_azureml_elastic_apart"
"""Attribute of an accelerator that belongs to another stack, such as ``transformers.Trainer``."""

_STACKS = ("accelerate", "transformers", "trl", "lightning", "pytorch_lightning", "deepspeed", "azureml_elastic")

_REPLACED = (EpochLoader, SequentialLoader)
"""Loaders in place of the script's."""

_data = TrainingData()

Wrapped = Callable[..., Any]


def attach_to_state(module: ModuleType) -> None:
    """Attach to ``accelerate.state``: the session opens the process group before the stack would."""

    def begin(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        session = stack_session()
        if session is not None and not device_of(session.device).separate:
            # else the ranks of a machine without a GPU train apart
            args, kwargs = (), {**kwargs, **({"backend": "gloo"} if _uses_deepspeed() else {"cpu": True})}
        return wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "PartialState.__init__", begin)


def attach_to_data_loader(module: ModuleType) -> None:
    """Attach to ``accelerate.data_loader``: batches that are trained are skipped without the script."""

    def skip(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        loader = args[0] if args else kwargs.get("dataloader")
        return loader if isinstance(loader, _REPLACED) else wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "skip_first_batches", skip)


def attach_to_local_sgd(module: ModuleType) -> None:
    """Attach to ``accelerate.local_sgd``: between two of its averages no rank has the state of the run."""

    def begin(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        _data.leave_all("LocalSGD trains each rank by itself")
        return wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "LocalSGD.__init__", begin)


def attach_to_logging(module: ModuleType) -> None:
    """Attach to ``accelerate.logging``."""
    wrap_function_wrapper(module, "MultiProcessAdapter.log", _unless_silent)


def attach_to_optimizer(module: ModuleType) -> None:
    """Attach to ``accelerate.optimizer``."""
    step = module.AcceleratedOptimizer.step

    @functools.wraps(step)
    def stepped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _data.loop is None:
            return step(optimizer, *args, **kwargs)
        return _data.loop.optimizer_step(optimizer, functools.partial(step, optimizer), *args, **kwargs)

    # A plain function: a scheduler that is made with a prepared optimizer calls what is bound, past wrapt's proxies.
    module.AcceleratedOptimizer.step = stepped
    wrap_function_wrapper(module, "AcceleratedOptimizer.zero_grad", _in_loop("zero_grad"))


def attach_to_parallelism(module: ModuleType) -> None:
    """Attach to ``accelerate.parallelism_config``: a mesh has the ranks of the round, whatever the script says."""

    def make_mesh(wrapped: Wrapped, config: Any, args: Any, kwargs: Any) -> Any:
        session = stack_session()
        if session is not None and config.device_mesh is None:
            fit_to_round(session, config)
        return wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "ParallelismConfig.get_device_mesh", make_mesh)


def attach_to_scheduler(module: ModuleType) -> None:
    """Attach to ``accelerate.scheduler``."""

    def step(wrapped: Wrapped, scheduler: Any, args: Any, kwargs: Any) -> Any:
        loop = _data.loop
        return wrapped(*args, **kwargs) if loop is None else loop.scheduler_step(wrapped, scheduler, *args, **kwargs)

    wrap_function_wrapper(module, "AcceleratedScheduler.step", step)


def attach_to_accelerator(module: ModuleType) -> None:
    """Attach to ``accelerate.accelerator``."""
    wrap = functools.partial(wrap_function_wrapper, module)
    wrap("Accelerator.prepare_data_loader", _prepare_data_loader)
    wrap("Accelerator._do_sync", _do_sync)
    wrap("Accelerator._prepare_deepspeed", _prepare_deepspeed)
    wrap("Accelerator.backward", _backward)
    for name in (
        *("save_state", "load_state", "end_training", "clip_grad_value_"),
        *("gather", "reduce", "pad_across_processes", "wait_for_everyone"),
    ):
        wrap(f"Accelerator.{name}", _in_loop(name))
    wrap("Accelerator.gather_for_metrics", _in_loop("gather"))
    for name in ("print", "log"):
        wrap(f"Accelerator.{name}", _unless_silent)
    processes = module.Accelerator.num_processes.fget
    module.Accelerator.num_processes = property(functools.partial(_num_processes, processes))


def _uses_deepspeed() -> bool:
    """Return whether the accelerator that is being made has a DeepSpeed plugin, which a CPU of accelerate excludes."""
    return WorkerEnvironment.read().accelerate_uses_deepspeed


def _in_loop(name: str) -> Wrapped:
    """Return a wrapper that calls a method of the training loop where there is one."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) if _data.loop is None else getattr(_data.loop, name)(wrapped, *args, **kwargs)

    return wrapper


def _backward(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    session = None if getattr(accelerator, _APART, False) else stack_session()
    if session is not None:
        _data.warn_of_left(session, accelerator)
    return wrapped(*args, **kwargs) if _data.loop is None else _data.loop.backward(wrapped, *args, **kwargs)


def _unless_silent(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """Print or log what was not when the steps before it were trained."""
    return None if _data.loop is not None and _data.loop.silent else wrapped(*args, **kwargs)


def _num_processes(wrapped: Callable[[Any], int], accelerator: Any) -> int:
    """Return the number of ranks of a run with all nodes to a script, whose schedules must not depend on the present.

    accelerate itself and stacks above it receive the number of ranks that there are, and so does a script within a
    step: it weighs a loss by that number.
    """
    caller = str(sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001
    session = None if caller.partition(".")[0] in _STACKS or getattr(accelerator, _APART, False) else stack_session()
    if session is None or (_data.loop is not None and _data.loop.weighs_by_ranks()):
        return wrapped(accelerator)
    return session.reference_world_size


def _do_sync(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    return None if _data.loop is not None and _data.loop.synchronize() else wrapped(*args, **kwargs)


def _prepare_deepspeed(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    with preparing():
        return wrapped(*args, **kwargs)


def _prepare_data_loader(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    loader = args[0] if args else kwargs.get("data_loader")
    if isinstance(loader, _REPLACED):
        return loader
    session = None if getattr(accelerator, _APART, False) else stack_session()
    if session is None or not isinstance(loader, DataLoader) or getattr(loader, "_is_accelerate_prepared", False):
        return wrapped(*args, **kwargs)
    return _data.prepare(session, accelerator, loader, functools.partial(wrapped, *args, **kwargs))
