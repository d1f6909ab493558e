"""Attaches the integrations of training stacks to a worker, when its script imports the stack.

A module of the training process is imported by name, and only where the script has imported its stack.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from wrapt import register_post_import_hook

from azureml_elastic.config import environment as variables

__all__ = ["ATTACHMENTS", "for_plain_start", "is_off", "register"]

_INTEGRATIONS = "azureml_elastic.train.integrations"

ATTACHMENTS = {
    "accelerate.accelerator": ("accelerate.attachment", "attach_to_accelerator"),
    "accelerate.data_loader": ("accelerate.attachment", "attach_to_data_loader"),
    "accelerate.optimizer": ("accelerate.attachment", "attach_to_optimizer"),
    "accelerate.logging": ("accelerate.attachment", "attach_to_logging"),
    "accelerate.scheduler": ("accelerate.attachment", "attach_to_scheduler"),
    "accelerate.state": ("accelerate.attachment", "attach_to_state"),
    "deepspeed": ("deepspeed.attachment", "attach_to_package"),
    "deepspeed.runtime.engine": ("deepspeed.attachment", "attach_to_engine"),
    **{
        f"{package}.{module}": ("lightning.attachment", function)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, function in (
            ("loggers.csv_logs", "attach_to_csv_logger"),
            ("loops.fit_loop", "attach_to_fit_loop"),
            ("loops.training_epoch_loop", "attach_to_epoch_loop"),
            ("strategies.strategy", "attach_to_strategy"),
            ("trainer.connectors.checkpoint_connector", "attach_to_checkpoints"),
            ("trainer.connectors.signal_connector", "attach_to_signals"),
            ("trainer.trainer", "attach_to_trainer"),
        )
    },
    "transformers.training_args": ("transformers.attachment", "attach_to_arguments"),
    "transformers.trainer_utils": ("transformers.attachment", "attach_to_utilities"),
    "transformers.trainer": ("transformers.attachment", "attach_to_trainer"),
}
"""Module of the integration and its function, by module of the stack."""

_registered: list[bool] = []

_START_UP = str(Path(__file__).with_name("plain_start"))
"""Folder of the module that Python runs at the start of a worker that is not forked."""


def register(environ: Mapping[str, str] = os.environ) -> None:
    """Attach the integrations to all stacks that this process imports, unless they are switched off."""
    if variables.CHANNEL not in environ or is_off(environ) or _registered:
        return
    _registered.append(True)  # a fork of a process that has attached them has them
    for name, (module, function) in ATTACHMENTS.items():
        register_post_import_hook(_hook(f"{_INTEGRATIONS}.{module}", function), name)


def is_off(environ: Mapping[str, str]) -> bool:
    """Return whether the integrations are switched off."""
    return environ.get(variables.INTEGRATIONS) == "off"


def for_plain_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that is not forked, with which it attaches the integrations by itself."""
    if is_off(environ):
        return dict(environ)
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": f"{_START_UP}{os.pathsep}{path}" if path else _START_UP}


def _hook(module: str, function: str):  # type: ignore[no-untyped-def] # noqa: ANN202
    def attach(imported: ModuleType) -> None:
        getattr(importlib.import_module(module), function)(imported)

    return attach
