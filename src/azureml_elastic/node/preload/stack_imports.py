"""Attaches the integrations of training stacks to a worker, when its script imports the stack.

A module of the training process is imported by name, and only where the script has imported its stack.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

from wrapt import register_post_import_hook

from azureml_elastic.config import environment as variables

__all__ = ["ATTACHMENTS", "STACKS", "register"]

_INTEGRATIONS = "azureml_elastic.train.integrations"

ATTACHMENTS = {
    "transformers.training_args": ("transformers.attachment", "attach_to_arguments"),
    "transformers.trainer_utils": ("transformers.attachment", "attach_to_utilities"),
    "transformers.trainer": ("transformers.attachment", "attach_to_trainer"),
}
"""Module of the integration and its function, by module of the stack."""

STACKS = frozenset(name.partition(".")[0] for name in ATTACHMENTS)
"""Top-level packages of the stacks."""


def register(environ: Mapping[str, str] = os.environ) -> None:
    """Attach the integrations to all stacks that this process imports, unless they are switched off."""
    if variables.CHANNEL not in environ or environ.get(variables.INTEGRATIONS) == "off":
        return
    for name, (module, function) in ATTACHMENTS.items():
        register_post_import_hook(_hook(f"{_INTEGRATIONS}.{module}", function), name)


def _hook(module: str, function: str):  # type: ignore[no-untyped-def] # noqa: ANN202
    def attach(imported: ModuleType) -> None:
        getattr(importlib.import_module(module), function)(imported)

    return attach
