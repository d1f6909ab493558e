"""Wraps the functions of accelerate on which the integration depends, when the script imports them."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch.utils.data import DataLoader

from azureml_elastic.distributed.device import device_of
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.integrations.accelerate.training_data import (
    FULL_RANKS,
    TrainingData,
    UndecidedLoader,
    fit_to_round,
)
from azureml_elastic.train.integrations.deepspeed.attachment import another_stack_prepares
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader
from azureml_elastic.train.integrations.script_loop.own_schedulers import note_schedulers
from azureml_elastic.train.integrations.wrapping import Wrapped, Wrappers, attaching, holds, in_loop, in_session
from azureml_elastic.train.session.stack_session import StackSession, stack_session

_APART = "_azureml_elastic_apart"
"""Attribute of an accelerator that belongs to another stack, such as ``transformers.Trainer``."""

_STACKS = ("accelerate", "transformers", "trl", "lightning", "pytorch_lightning", "deepspeed", "azureml_elastic")

_REPLACED = (EpochLoader, UndecidedLoader, WindowLoader)
"""Loaders in place of the script's; the last is that of ``transformers.Trainer``."""

_data = TrainingData()

_LOG = logging.getLogger(__name__)

another_stack_trains: ContextVar[bool] = ContextVar("another_stack_trains", default=False)
"""Whether ``Trainer.train()`` runs, whose integration sees what its accelerator trains."""


def _replace_step(module: Any) -> None:
    optimizer = module.AcceleratedOptimizer
    step = optimizer.step

    @functools.wraps(step)
    def stepped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _data.loop is None:
            return step(optimizer, *args, **kwargs)
        return _data.loop.optimizer_step(optimizer, functools.partial(step, optimizer), *args, **kwargs)

    # A plain function: torch's schedulers patch the optimizer that they are made with, and call what is bound to it by
    # __func__, past wrapt's proxy. The steps of a script that makes its scheduler with the prepared one were not seen.
    optimizer.step = stepped


@in_session
def _begin(session: StackSession, wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """Have the session open the process group before the stack would."""
    session.wait_at_most(kwargs.get("timeout"))  # of InitProcessGroupKwargs
    if not device_of(session.device).separate:
        # Without these accelerate takes no notice of the ranks on a machine without a GPU, and each trains apart. A
        # DeepSpeed plugin excludes cpu=True.
        deepspeed = WorkerEnvironment.read().accelerate_uses_deepspeed
        args, kwargs = (), {**kwargs, **({"backend": "gloo"} if deepspeed else {"cpu": True})}
    return wrapped(*args, **kwargs)


def _skip_first_batches(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    loader = args[0] if args else kwargs.get("dataloader")
    # Those in place of the script's leave out by themselves what is trained. transformers imports this function by
    # name, after it is wrapped.
    return loader if isinstance(loader, _REPLACED) or hasattr(loader, "begin_at") else wrapped(*args, **kwargs)


def _begin_local_sgd(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    # Between two of its averages no rank has the state of the run.
    _data.leave_all("LocalSGD trains each rank by itself")
    return wrapped(*args, **kwargs)


@in_session
def _make_mesh(session: StackSession, wrapped: Wrapped, config: Any, args: Any, kwargs: Any) -> Any:
    if config.device_mesh is None:
        fit_to_round(session, config)
    return wrapped(*args, **kwargs)


def _backward(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    if getattr(accelerator, _APART, False):
        if not another_stack_trains.get() and (session := stack_session()) is not None and session.is_main:
            _warn_of_own_loop()
    elif (session := stack_session()) is not None:
        _data.warn_of_left(session, accelerator)
    return wrapped(*args, **kwargs) if _data.loop is None else _data.loop.backward(wrapped, *args, **kwargs)


@functools.cache
def _warn_of_own_loop() -> None:
    _LOG.warning(
        "A loop that is not that of Trainer.train() trains with the trainer's accelerator: the run neither saves nor "
        "restores this training. After a change of its nodes the script starts again, from what it saves and loads by "
        "itself."
    )


def _unless_silent(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """Print or log what was not when the steps before it were trained."""
    return None if _data.loop is not None and _data.loop.loop.silent else wrapped(*args, **kwargs)


def _num_processes(wrapped: Callable[[Any], int], accelerator: Any) -> int:
    """Return the number of ranks of a run with all nodes to a script, whose schedules must not depend on the present.

    accelerate itself and stacks above it receive the number of ranks that there are, and so does a script within a
    step: it weighs a loss by that number.
    """
    if _data.prepares_for_all_nodes:
        session = stack_session()
        return wrapped(accelerator) if session is None else session.reference_world_size
    caller = str(sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001
    if caller.startswith("trl.") and hasattr(accelerator, FULL_RANKS):
        return int(getattr(accelerator, FULL_RANKS))
    session = None if caller.partition(".")[0] in _STACKS or getattr(accelerator, _APART, False) else stack_session()
    if session is None or (_data.loop is not None and _data.loop.weighs_by_ranks()):
        return wrapped(accelerator)
    return session.reference_world_size


def _do_sync(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    return None if _data.loop is not None and _data.loop.loop.synchronize() else wrapped(*args, **kwargs)


def _prepare_deepspeed(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    with holds(another_stack_prepares):
        return wrapped(*args, **kwargs)


def _prepare_data_loader(wrapped: Wrapped, accelerator: Any, args: Any, kwargs: Any) -> Any:
    loader = args[0] if args else kwargs.get("data_loader")
    if isinstance(loader, _REPLACED):
        return loader
    session = None if getattr(accelerator, _APART, False) else stack_session()
    if session is None or not isinstance(loader, DataLoader) or getattr(loader, "_is_accelerate_prepared", False):
        return wrapped(*args, **kwargs)
    return _data.prepare(session, accelerator, loader, functools.partial(wrapped, *args, **kwargs))


def _in_loop(method: str, *, with_instance: bool = False) -> Wrapped:
    return in_loop(method, lambda _: _data.loop, with_instance=with_instance)


def _replace_number_of_ranks(module: Any) -> None:
    note_schedulers()
    ranks = module.Accelerator.num_processes.fget
    module.Accelerator.num_processes = property(functools.partial(_num_processes, ranks))


WRAPPERS: Wrappers = {
    "accelerate.accelerator": {
        "Accelerator.prepare_data_loader": _prepare_data_loader,
        # accumulate() calls it before a batch is computed, to decide by its own count whether gradients are reduced.
        "Accelerator._do_sync": _do_sync,
        "Accelerator._prepare_deepspeed": _prepare_deepspeed,
        "Accelerator.backward": _backward,
        **{
            f"Accelerator.{name}": _in_loop(name)
            for name in (
                *("save_state", "load_state", "end_training", "clip_grad_value_"),
                *("gather", "reduce", "pad_across_processes", "wait_for_everyone"),
            )
        },
        "Accelerator.gather_for_metrics": _in_loop("gather"),
        "Accelerator.print": _unless_silent,
        "Accelerator.log": _unless_silent,
    },
    "accelerate.data_loader": {"skip_first_batches": _skip_first_batches},
    "accelerate.local_sgd": {"LocalSGD.__init__": _begin_local_sgd},
    "accelerate.logging": {"MultiProcessAdapter.log": _unless_silent},
    "accelerate.optimizer": {"AcceleratedOptimizer.zero_grad": _in_loop("zero_grad")},
    # Later than the script has made its configuration, and before accelerate compares its sizes with the ranks.
    "accelerate.parallelism_config": {"ParallelismConfig.get_device_mesh": _make_mesh},
    "accelerate.scheduler": {"AcceleratedScheduler.step": _in_loop("scheduler_step", with_instance=True)},
    # All that accelerate knows of ranks and devices comes of this object, which the first Accelerator makes.
    "accelerate.state": {"PartialState.__init__": _begin},
}

attach = attaching(
    WRAPPERS, {"accelerate.optimizer": _replace_step, "accelerate.accelerator": _replace_number_of_ranks}
)
