"""What callbacks and the module would write into a checkpoint of Lightning, by its own hooks.

A callback such as ``WeightAveraging`` keeps its state in a checkpoint by ``on_save_checkpoint()``. The hooks are called
with a dictionary like that of Lightning, and what they have added or replaced is kept; of weights that are the model's
the names alone, as the model is tracked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.errors import UsageError

OWN_KEY = "azureml_elastic"
"""State key of a callback of the integration."""

_OF_MODEL = "azureml_elastic.model"
"""Key of a mapping that stands for a tensor of the model, whose name is the value."""

_SAVE, _LOAD = "on_save_checkpoint", "on_load_checkpoint"

_LOG = logging.getLogger(__name__)

_warned: set[str] = set()


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the trainer's callbacks without those of the integration."""
    return [each for each in trainer.callbacks if getattr(each, "state_key", None) != OWN_KEY]


def saved(trainer: Any, captured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the hooks of those that save and load by them have added to a checkpoint.

    Args:
        captured: states of the loops and callbacks, as they were at the last capture
    """
    savers = _with_hooks(trainer)
    if not savers:
        return {}
    checkpoint = _checkpoint(trainer, captured)
    before = dict(checkpoint)
    for name, save, _ in savers:
        try:
            save(checkpoint)
        except Exception as error:  # noqa: BLE001 - a script's own
            _warn(name, f"{_SAVE}() has failed ({type(error).__name__}: {error})")
    own = _names_by_memory(before["state_dict"])
    found = {}
    for key, value in checkpoint.items():
        if key in before and value is before[key]:
            continue
        kept = _replaced(value, own)
        try:
            tree.split("", kept)
        except UsageError as error:
            _warn(f"checkpoint[{key!r}]", str(error))
        else:
            found[key] = kept
    return found


def restore(trainer: Any, found: Mapping[str, Any], captured: Mapping[str, Any]) -> None:
    """Give those hooks what :func:`saved` has returned, after the model was restored."""
    loaders = _with_hooks(trainer)
    if not found or not loaders:
        return
    checkpoint = _checkpoint(trainer, captured)
    weights = checkpoint["state_dict"]
    checkpoint.update({key: _returned(value, weights) for key, value in found.items()})
    for name, _, load in reversed(loaders):  # the module's first, as Lightning does
        try:
            load(checkpoint)
        except Exception as error:  # noqa: BLE001 - a script's own
            _warn(name, f"{_LOAD}() has failed ({type(error).__name__}: {error})")


def _with_hooks(trainer: Any) -> list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return name and hooks of the callbacks, and of the module, that have hooks of their own to save and to load."""
    module = trainer.lightning_module
    found = []
    for each in callbacks_of(trainer):
        if all(_own(each, name, "Callback") for name in (_SAVE, _LOAD)):
            save, load = (_bound(getattr(each, name), trainer, module) for name in (_SAVE, _LOAD))
            found.append((type(each).__name__, save, load))
    if module is not None and all(_own(module, name, "CheckpointHooks") for name in (_SAVE, _LOAD)):
        found.append((type(module).__name__, module.on_save_checkpoint, module.on_load_checkpoint))
    return found


def _own(holder: Any, name: str, base: str) -> bool:
    return getattr(getattr(holder, name), "__qualname__", "") != f"{base}.{name}"


def _bound(hook: Any, trainer: Any, module: Any) -> Callable[[Any], Any]:
    return lambda checkpoint: hook(trainer, module, checkpoint)


def _checkpoint(trainer: Any, captured: Mapping[str, Any]) -> dict[str, Any]:
    module = trainer.lightning_module
    checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "loops": {"fit_loop": captured["loops"]},
        "callbacks": captured["callbacks"],
        "optimizer_states": [each.state_dict() for each in trainer.strategy.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    if module.hparams:
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
    return checkpoint


def _names_by_memory(weights: Mapping[str, Any]) -> dict[tuple[int, torch.Size], str]:
    tensors = ((name, value) for name, value in weights.items() if isinstance(value, torch.Tensor) and value.numel())
    return {(value.data_ptr(), value.shape): name for name, value in tensors}


def _replaced(value: Any, own: Mapping[tuple[int, torch.Size], str]) -> Any:
    """Return a nested value with marks in place of the model's tensors."""
    if isinstance(value, torch.Tensor):
        name = own.get((value.data_ptr(), value.shape)) if value.numel() else None
        return value.detach() if name is None else {_OF_MODEL: name}
    if isinstance(value, Mapping):
        return {key: _replaced(each, own) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, own) for each in value)
    return value


def _returned(value: Any, weights: Mapping[str, Any]) -> Any:
    """Return a nested value with the model's tensors in place of their marks."""
    if isinstance(value, Mapping):
        if set(value) == {_OF_MODEL}:
            return weights[value[_OF_MODEL]]
        return {key: _returned(each, weights) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_returned(each, weights) for each in value)
    return value


def _warn(name: str, why: str) -> None:
    if name not in _warned:
        _warned.add(name)
        _LOG.warning("What %s keeps in a checkpoint begins anew in a new process: %s", name, why)
