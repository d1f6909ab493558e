"""Wraps the functions of Lightning on which the integration depends, when the script imports them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.train.integrations.lightning import training_loop
from azureml_elastic.train.integrations.lightning.left_to_lightning import warn_of_repeated_samples
from azureml_elastic.train.integrations.lightning.training_loop import (
    PROGRESS,
    TrainingLoop,
    obstacle,
    tensor_parallel_size,
)
from azureml_elastic.train.integrations.wrapping import Wrapped, Wrappers, attaching, in_loop, in_session
from azureml_elastic.train.session.stack_session import StackSession

_LOOP = "_azureml_elastic_loop"
"""Attribute of a trainer with the :class:`TrainingLoop` while it trains."""


def _in_loop(method: str, trainer_of: Callable[[Any], Any] = lambda instance: instance.trainer) -> Wrapped:
    return in_loop(method, lambda instance: getattr(trainer_of(instance), _LOOP, None))


def _initialize_fabric(wrapped: Wrapped, fabric: Any, args: Any, kwargs: Any) -> Any:
    """Have a loop of the script's own, without a session, start at any world size."""
    environment = WorkerEnvironment.read()
    if environment.has_world_size:
        kwargs = {**kwargs, **_sizes(environment.world_size)}
    return wrapped(*args, **kwargs)


def _check_folder(wrapped: Wrapped, writer: Any, args: Any, kwargs: Any) -> Any:
    return None if training_loop.continue_file(writer) else wrapped(*args, **kwargs)


@in_session
def _set_up_mesh(session: StackSession, wrapped: Wrapped, strategy: Any, args: Any, kwargs: Any) -> Any:
    """Have the mesh made of the ranks of the round, not of those that the script knows."""
    tensor = tensor_parallel_size(strategy)
    if session.world_size % tensor == 0:
        strategy._data_parallel_size = session.world_size // tensor  # noqa: SLF001
    return wrapped(*args, **kwargs)


def _process_dataloader(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    return in_loop("process_dataloader", lambda _: getattr(args[0], _LOOP, None))(wrapped, instance, args, kwargs)


@in_session
def _process_evaluation(session: StackSession, wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    loader = wrapped(*args, **kwargs)
    if session.is_main:
        warn_of_repeated_samples(loader, session.world_size)
    return loader


@in_session
def _leave_out(*_: Any) -> None:
    """Do nothing."""


@in_session
def _initialize(session: StackSession, wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    if not args:
        kwargs = {**kwargs, **_sizes(session.world_size)}
    result = wrapped(*args, **kwargs)
    session.wait_at_most(getattr(trainer.strategy, "_timeout", None))
    if not session.over and not session.trains and (found := session.find(PROGRESS, "loggers")):
        training_loop.continue_from(trainer, found)  # before callbacks and the script ask for their folders
    return result


def _sizes(world_size: int) -> dict[str, int]:
    """Return the arguments of Lightning for the nodes of this round.

    The script's own are those of all nodes, and Lightning refuses others than there are.
    """
    per_node = WorkerEnvironment.read().local_world_size
    return {"devices": per_node, "num_nodes": world_size // per_node}


def _search(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """Leave a search for a learning rate or a batch size, which is none of the training's steps, to Lightning."""
    trainer = args[0] if args else kwargs["trainer"]
    loop = vars(trainer).pop(_LOOP, None)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if loop is not None:
            setattr(trainer, _LOOP, loop)
            trainer.fit_loop._combined_loader = None  # noqa: SLF001 - that of the search


@in_session
def _run(session: StackSession, wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    if trainer.state.fn != "fit" or obstacle(session, trainer, *args) is not None:
        return wrapped(*args, **kwargs)
    loop = TrainingLoop(session, trainer)
    setattr(trainer, _LOOP, loop)
    try:
        return loop.run(functools.partial(wrapped), *args, **kwargs)
    finally:
        delattr(trainer, _LOOP)


WRAPPERS: Wrappers = {
    ".fabric": {"Fabric.__init__": _initialize_fabric},
    # It removes the file of an existing folder, which this run has begun.
    "loggers.csv_logs": {"ExperimentWriter._check_log_dir_exists": _check_folder},
    "loops.fit_loop": {
        "_process_dataloader": _process_dataloader,
        "_FitLoop.run": _in_loop("fit"),
        "_FitLoop.setup_data": _in_loop("setup_data"),
        "_FitLoop.on_run_start": _in_loop("start_training"),
        "_FitLoop.on_advance_start": _in_loop("start_epoch"),
        "_FitLoop.on_advance_end": _in_loop("end_epoch"),
    },
    "loops.evaluation_loop": {"_process_dataloader": _process_evaluation},
    "loops.training_epoch_loop": {
        "_TrainingEpochLoop.on_run_start": _in_loop("begin_epoch"),
        # After the batch's hooks: it validates, advances schedulers that follow a metric, and counts the loggers' step.
        "_TrainingEpochLoop.on_advance_end": _in_loop("end_step"),
        # A broadcast from rank 0 in each batch, to agree on a signal; the ranks agree at step boundaries already.
        "_TrainingEpochLoop._broadcast_sigterm_tensor": _leave_out,
    },
    "strategies.model_parallel": {"ModelParallelStrategy.setup_environment": _set_up_mesh},
    "strategies.strategy": {
        "Strategy.backward": _in_loop("backward", lambda strategy: getattr(strategy.lightning_module, "_trainer", None))
    },
    # The last step before the loops run: model and optimizers are wrapped and on their device.
    "trainer.connectors.checkpoint_connector": {
        "_CheckpointConnector.restore_callbacks": _in_loop("restore_callbacks"),
        "_CheckpointConnector.restore_training_state": _in_loop("restore"),
    },
    # Lightning's handler calls a collective from within a signal, and then ends the ranks. Notices come to all ranks at
    # a step boundary instead.
    "trainer.connectors.signal_connector": {
        "_SignalConnector._sigterm_notifier_fn": _leave_out,
        "_SignalConnector.register_signal_handlers": _leave_out,
    },
    "tuner.batch_size_scaling": {"_scale_batch_size": _search},
    "tuner.lr_finder": {"_lr_find": _search},
    "trainer.trainer": {"Trainer.__init__": _initialize, "Trainer._run": _run},
}

attach = attaching(WRAPPERS)
