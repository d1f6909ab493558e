"""Attaches the integrations of training stacks to a worker, when its script imports the stack.

A module of the training process is imported by name, and only where the script has imported its stack. The same way
torch gets the check that a script without a session has no ranks and addresses of its own, and MLflow what lets a
script log its parameters again.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from wrapt import register_post_import_hook

from azureml_elastic.environment import names as variables

_INTEGRATIONS = "azureml_elastic.train.integrations"

_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerate": {
        "accelerate": (
            *("accelerator", "data_loader", "local_sgd", "logging", "optimizer", "parallelism_config", "scheduler"),
            "state",
        )
    },
    "deepspeed": {"deepspeed": ("", "runtime.engine")},
    "lightning": {
        "lightning.fabric": ("fabric",),
        "lightning_fabric": ("fabric",),
        **dict.fromkeys(
            ("lightning.pytorch", "pytorch_lightning"),
            (
                "loggers.csv_logs",
                "loops.evaluation_loop",
                "loops.fit_loop",
                "loops.training_epoch_loop",
                "strategies.model_parallel",
                "strategies.strategy",
                "trainer.connectors.checkpoint_connector",
                "trainer.connectors.signal_connector",
                "trainer.trainer",
                "tuner.batch_size_scaling",
                "tuner.lr_finder",
            ),
        ),
    },
    "transformers": {"transformers": ("trainer", "trainer_utils", "training_args")},
}

ATTACHMENTS = {
    f"{package}.{module}".rstrip("."): stack
    for stack, packages in _MODULES.items()
    for package, modules in packages.items()
    for module in modules
}
"""Name of the integration, by module of the stack."""

_CHECKS = {
    "torch.distributed.rendezvous": ("azureml_elastic.distributed.launch_check", "attach_to_rendezvous"),
    "torch.multiprocessing.spawn": ("azureml_elastic.distributed.launch_check", "attach_to_spawn"),
}
"""The check of ranks and addresses, by module of torch."""

_TRACKING = {
    "mlflow.tracking._tracking_service.client": ("azureml_elastic.train.mlflow_parameters", "attach_to_client")
}
"""What lets a script log its parameters again after a restart, by module of MLflow; for all scripts."""

_registered: set[str] = set()

_START_UP = str(Path(__file__).with_name("plain_start"))
"""Folder of the module that Python runs at the start of a worker that is not forked."""


def register(environ: Mapping[str, str] = os.environ) -> None:
    """Attach the integrations to all stacks that this process imports; those that are not switched off."""
    if variables.CHANNEL not in environ:
        return
    _register(_TRACKING)
    if not is_off(environ):
        _register({name: (f"{_INTEGRATIONS}.{stack}.attachment", "attach") for name, stack in ATTACHMENTS.items()})
        _register(_CHECKS)


def is_off(environ: Mapping[str, str]) -> bool:
    """Return whether the integrations are switched off."""
    return environ.get(variables.INTEGRATIONS) == "off"


def for_plain_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that is not forked, with which it does what a forked one finds done."""
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": f"{_START_UP}{os.pathsep}{path}" if path else _START_UP}


def _register(attachments: Mapping[str, tuple[str, str]]) -> None:
    """Attach functions, given with their modules, by modules that a script may import."""
    for name, (module, function) in attachments.items():
        if name not in _registered:  # a fork of a process that has attached them has them
            _registered.add(name)
            register_post_import_hook(_hook(module, function), name)


def _hook(module: str, function: str):  # type: ignore[no-untyped-def] # noqa: ANN202
    def attach(imported: ModuleType) -> None:
        getattr(importlib.import_module(module), function)(imported)

    return attach
