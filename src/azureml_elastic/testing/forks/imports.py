"""Imports of the fork server of a workspace: what agents import late, and torch in its first steps.

The server imports the other modules of an agent, and torch, itself.
"""

from __future__ import annotations

import contextlib
import importlib

from azureml_elastic.forks import import_loader

_AGENT = (
    "azureml_elastic.node.azure.credentials",
    "azureml_elastic.node.azure.workspace",
    "azureml_elastic.node.publishing.mlflow",
    "azureml_elastic.node.replacement.jobs",
    "azureml_elastic.node.table.azure",
)

for name in _AGENT:
    importlib.import_module(name)
for name in import_loader.LATER:
    with contextlib.suppress(ImportError):  # other versions of torch do not have all of them
        importlib.import_module(name)
