"""Hooks of Lightning that a new process runs again, as a former one was interrupted in them.

They see what they would have seen: the step's forward pass is repeated for them without gradients, as modules keep
something of it in attributes. What it changes is put back, and what it logs counts nothing. A hook that fails all the
same, which has run on some ranks before, does not end the run.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.distributed.process_groups import is_peer_error
from azureml_elastic.errors import ElasticError
from azureml_elastic.train.integrations.lightning.attributes import Attributes
from azureml_elastic.train.integrations.lightning.checkpoint_hooks import callbacks_of
from azureml_elastic.train.integrations.nested import tensors_of

_BATCH_END, _EPOCH_START = "on_train_batch_end", "on_train_epoch_start"

_LOG = logging.getLogger(__name__)


class Extent:
    """How many of a step's hooks a process has run: none, those of the callbacks, or the module's too."""

    NONE, CALLBACKS, ALL = range(3)


def run_hooks(
    trainer: Any, batch: Any, record: Mapping[str, Mapping[str, float]], attributes: Attributes, extent: int
) -> None:
    """Run the hooks after a batch, and log the metrics of its step.

    Args:
        trainer: trainer whose loops are as after these hooks
        batch: collated batch, on the CPU
        record: what the metrics and outputs were in the former process, as numbers
        attributes: those of the module and callbacks
        extent: hooks that have run in the former process: the module's tensors are as after them
    """
    loop, module, connector = trainer.fit_loop.epoch_loop, trainer.lightning_module, trainer._logger_connector  # noqa: SLF001
    call = _calls_of(trainer)
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
    batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)  # noqa: SLF001
    connector.on_batch_start(batch)
    repeated, again = _forward_again(trainer, batch, attributes)
    outputs = {**repeated, **{name: torch.tensor(value) for name, value in record["outputs"].items()}} or None
    with same_names(trainer, repeated=True):
        with _kept((lambda: _of_module(module)) if extent >= Extent.CALLBACKS else None):
            for each in callbacks_of(trainer):
                _run_hook(trainer, each, _BATCH_END, trainer, module, outputs, batch, loop.batch_idx)
        with _kept((lambda: _of_module(module)) if extent >= Extent.ALL else None):
            _run_hook(trainer, module, _BATCH_END, outputs, batch, loop.batch_idx)
    for name, (present, value) in again.items():
        if getattr(module, name, None) is present:  # not set by a hook
            setattr(module, name, value)
    connector.on_batch_end()
    if connector.should_update_logs:
        values = {name: torch.tensor(value) for name, value in record["metrics"].items()}
        connector.log_metrics({**values, **connector.metrics["log"]})


def begin_epoch_again(trainer: Any) -> None:
    """Run the hooks at the beginning of an epoch, which a former process has run: some objects are made in them.

    Lightning leaves them out where it continues within an epoch. Weights, rates and random generators are put back.
    """
    module = trainer.lightning_module
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    settings = [{key: copy.copy(value) for key, value in group.items() if key != "params"} for group in groups]
    loggers, trainer.loggers = trainer.loggers, []  # it is logged already
    try:
        with _logs_dropped(trainer), _kept(lambda: _tensors(trainer)), _random_kept(trainer):
            for each in callbacks_of(trainer):
                _run_hook(trainer, each, _EPOCH_START, trainer, module)
            _run_hook(trainer, module, _EPOCH_START)
    finally:
        trainer.loggers = loggers
    for group, values in zip(groups, settings, strict=True):
        group.update(values)


def _forward_again(trainer: Any, batch: Any, attributes: Attributes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Repeat the forward pass of a step.

    Returns:
        What the step returns, and, for tensors in attributes that it has set anew, their names with this value and the
        one before, which is the one to go on from.
    """
    module, loop, call = trainer.lightning_module, trainer.fit_loop.epoch_loop, _calls_of(trainer)
    before = attributes.capture()
    arguments = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)  # noqa: SLF001
    found: Any = None
    # Not through the wrapper of data parallelism, whose forward pass has collectives.
    with _logs_dropped(trainer), _kept(lambda: _tensors(trainer)), _random_kept(trainer), torch.no_grad():
        try:
            with trainer.precision_plugin.train_step_context():
                found = call._call_lightning_module_hook(trainer, "training_step", *arguments.values())  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - a script's own
            module._current_fx_name = None  # noqa: SLF001
            _raise_if_peer(error)
            _warn("training_step", error, "The hooks of this step may lack what it keeps for them.")
    values = before.get("values", {}).get(type(module).__name__, {})
    again = {
        name: (getattr(module, name), value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and getattr(module, name, None) is not value
    }
    attributes.apply(before)
    for name, (present, _) in again.items():
        setattr(module, name, present)  # those of this batch, for the hooks
    if isinstance(found, torch.Tensor):
        return {"loss": found}, again
    return dict(found) if isinstance(found, Mapping) else {}, again


def _run_hook(trainer: Any, holder: Any, name: str, *args: Any) -> None:
    module = trainer.lightning_module
    before, module._current_fx_name = module._current_fx_name, name  # noqa: SLF001
    try:
        getattr(holder, name)(*args)
    except Exception as error:  # noqa: BLE001 - a script's own
        _raise_if_peer(error)
        _warn(f"{type(holder).__name__}.{name}", error, "What it does is left out this once, and the training goes on.")
    finally:
        module._current_fx_name = before  # noqa: SLF001


def _raise_if_peer(error: Exception) -> None:
    """Raise an error that the loss of a rank may have caused: others end the hook alone."""
    if isinstance(error, ElasticError) or is_peer_error(error):
        raise error


def _warn(name: str, error: Exception, consequence: str) -> None:
    _LOG.warning(
        "%s() was run again for a step whose hooks were interrupted by the end of a round, and has failed: %s: %s. %s",
        name,
        type(error).__name__,
        error,
        consequence,
        exc_info=error,
    )


@contextmanager
def _logs_dropped(trainer: Any) -> Iterator[None]:
    """Have ``self.log()`` count nothing."""
    loop = trainer.fit_loop.epoch_loop
    before, loop._results = loop._results, type(loop._results)(training=True)  # noqa: SLF001
    loop._results.batch, loop._results.batch_size = before.batch, before.batch_size  # noqa: SLF001
    try:
        yield
    finally:
        loop._results = before  # noqa: SLF001


@contextmanager
def _random_kept(trainer: Any) -> Iterator[None]:
    device = trainer.strategy.root_device
    state = random_state.capture(device)
    try:
        yield
    finally:
        random_state.restore(state, device)


@contextmanager
def _kept(tensors: Callable[[], Mapping[str, torch.Tensor]] | None) -> Iterator[None]:
    """Put back tensors after the block, by name: a hook may have put another buffer in the place of one."""
    copies = {} if tensors is None else {name: each.detach().clone() for name, each in tensors().items()}
    yield
    if tensors is not None:
        with torch.no_grad():
            for name, each in tensors().items():
                if name in copies and copies[name].shape == each.shape:
                    each.copy_(copies[name])


def _of_module(module: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": each for name, each in (*module.named_parameters(), *module.named_buffers())}


def _tensors(trainer: Any) -> dict[str, torch.Tensor]:
    module = trainer.lightning_module
    found = _of_module(module)
    for index, callback in enumerate(callbacks_of(trainer)):
        for name, value in vars(callback).items():
            path = f"{index}/{name}/"
            if isinstance(value, nn.Module):
                found |= {} if value is module else _of_module(value, path)
            else:
                found |= {f"{path}{number}": each for number, each in enumerate(tensors_of(value))}
    return found


def _calls_of(trainer: Any) -> Any:
    """Return Lightning's functions that call hooks: both packages hold the same modules, with classes of their own."""
    return importlib.import_module(type(trainer.fit_loop).__module__.replace("loops.fit_loop", "trainer.call"))


@contextmanager
def same_names(trainer: Any, *, repeated: bool) -> Iterator[None]:
    """Have files of ``ModelCheckpoint`` replaced that a former process may have written for the same step.

    Args:
        repeated: whether code is repeated; else nothing is changed
    """
    name = "_enable_version_counter"
    callbacks = [each for each in trainer.checkpoint_callbacks if repeated and hasattr(each, name)]
    before = [getattr(each, name) for each in callbacks]
    for each in callbacks:
        setattr(each, name, False)
    try:
        yield
    finally:
        for each, value in zip(callbacks, before, strict=True):
            setattr(each, name, value)
