"""Wraps the functions of Lightning on which the integration depends, when the script imports them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.train.integrations.lightning import training_loop
from azureml_elastic.train.integrations.lightning.training_loop import (
    PROGRESS,
    TrainingLoop,
    obstacle,
    tensor_parallel_size,
)
from azureml_elastic.train.session.stack_session import stack_session

__all__ = [
    "attach_to_checkpoints",
    "attach_to_csv_logger",
    "attach_to_epoch_loop",
    "attach_to_fabric",
    "attach_to_fit_loop",
    "attach_to_model_parallel",
    "attach_to_signals",
    "attach_to_strategy",
    "attach_to_trainer",
]

_LOOP = "_azureml_elastic_loop"
"""Attribute of a trainer with the :class:`TrainingLoop` while it trains."""

Wrapped = Callable[..., Any]


def attach_to_trainer(module: ModuleType) -> None:
    """Attach to ``trainer.trainer``."""
    wrap_function_wrapper(module, "Trainer.__init__", _initialize)
    wrap_function_wrapper(module, "Trainer._run", _run)


def attach_to_fabric(module: ModuleType) -> None:
    """Attach to ``fabric.fabric``: a loop of the script's own, without a session, starts at any world size."""

    def initialize(wrapped: Wrapped, fabric: Any, args: Any, kwargs: Any) -> Any:
        environment = WorkerEnvironment.read()
        if environment.has_world_size:
            kwargs = {**kwargs, **_sizes(environment.world_size)}
        return wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "Fabric.__init__", initialize)


def attach_to_checkpoints(module: ModuleType) -> None:
    """Attach to ``trainer.connectors.checkpoint_connector``."""
    name = "_CheckpointConnector.restore_training_state"
    wrap_function_wrapper(module, name, _in_loop("restore", lambda connector: connector.trainer))


def attach_to_fit_loop(module: ModuleType) -> None:
    """Attach to ``loops.fit_loop``."""

    def process(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        loop = getattr(args[0], _LOOP, None)
        return wrapped(*args, **kwargs) if loop is None else loop.process_dataloader(wrapped, *args, **kwargs)

    wrap_function_wrapper(module, "_process_dataloader", process)
    wrap_function_wrapper(module, "_FitLoop.run", _in_loop("fit", lambda loop: loop.trainer))
    wrap_function_wrapper(module, "_FitLoop.on_advance_end", _in_loop("end_epoch", lambda loop: loop.trainer))


def attach_to_epoch_loop(module: ModuleType) -> None:
    """Attach to ``loops.training_epoch_loop``."""
    name = "_TrainingEpochLoop"
    wrap_function_wrapper(module, f"{name}.on_run_start", _in_loop("begin_epoch", lambda loop: loop.trainer))
    wrap_function_wrapper(module, f"{name}.on_advance_end", _in_loop("end_step", lambda loop: loop.trainer))
    wrap_function_wrapper(module, f"{name}._broadcast_sigterm_tensor", _unless_elastic)


def attach_to_csv_logger(module: ModuleType) -> None:
    """Attach to ``training_loop.csv_logs``: a file of the run is continued, where Lightning would remove it."""

    def check(wrapped: Wrapped, writer: Any, args: Any, kwargs: Any) -> Any:
        return None if training_loop.continue_file(writer) else wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "ExperimentWriter._check_log_dir_exists", check)


def attach_to_model_parallel(module: ModuleType) -> None:
    """Attach to ``strategies.model_parallel``: a mesh has the ranks of the round, not those that the script knows."""

    def set_up(wrapped: Wrapped, strategy: Any, args: Any, kwargs: Any) -> Any:
        session, tensor = stack_session(), tensor_parallel_size(strategy)
        if session is not None and session.world_size % tensor == 0:
            strategy._data_parallel_size = session.world_size // tensor  # noqa: SLF001
        return wrapped(*args, **kwargs)

    wrap_function_wrapper(module, "ModelParallelStrategy.setup_environment", set_up)


def attach_to_strategy(module: ModuleType) -> None:
    """Attach to ``strategies.strategy``."""
    trainer_of = lambda strategy: getattr(strategy.lightning_module, "_trainer", None)  # noqa: E731
    wrap_function_wrapper(module, "Strategy.backward", _in_loop("backward", trainer_of))


def attach_to_signals(module: ModuleType) -> None:
    """Attach to ``trainer.connectors.signal_connector``: notices come at a step boundary, not by a signal."""
    wrap_function_wrapper(module, "_SignalConnector._sigterm_notifier_fn", _unless_elastic)
    wrap_function_wrapper(module, "_SignalConnector.register_signal_handlers", _unless_elastic)


def _in_loop(name: str, trainer_of: Callable[[Any], Any]) -> Wrapped:
    """Return a wrapper that calls a method of the training loop where there is one."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        loop = getattr(trainer_of(instance), _LOOP, None)
        return wrapped(*args, **kwargs) if loop is None else getattr(loop, name)(wrapped, *args, **kwargs)

    return wrapper


def _unless_elastic(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) if stack_session() is None else None


def _initialize(wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    session = stack_session()
    if session is None or session.over:
        return wrapped(*args, **kwargs)
    if not args:
        kwargs = {**kwargs, **_sizes(session.world_size)}
    result = wrapped(*args, **kwargs)
    if not session.trains and (found := session.find(PROGRESS, "loggers")):
        training_loop.continue_from(trainer, found)  # before callbacks and the script ask for their folders
    return result


def _sizes(world_size: int) -> dict[str, int]:
    """Return the arguments of Lightning for the nodes of this round.

    The script's own are those of all nodes, and Lightning refuses others than there are.
    """
    per_node = WorkerEnvironment.read().local_world_size
    return {"devices": per_node, "num_nodes": world_size // per_node}


def _run(wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    session = stack_session()
    if session is None or trainer.state.fn != "fit" or obstacle(session, trainer, *args) is not None:
        return wrapped(*args, **kwargs)
    loop = TrainingLoop(session, trainer)
    setattr(trainer, _LOOP, loop)
    try:
        return loop.run(functools.partial(wrapped), *args, **kwargs)
    finally:
        delattr(trainer, _LOOP)
