"""Imports of the fork server of tests: all that agents and workers import, also in functions."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

from azureml_elastic import node, train

for package in (node, train):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda _: None):
        if not module.name.endswith("__main__") and ".train.horovod" not in module.name:  # which needs Horovod
            importlib.import_module(module.name)
# The samples' data take longer than their training, and MLflow longer than all that an agent does.
for name in ("sklearn.datasets", "mlflow"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
