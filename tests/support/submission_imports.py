"""Imports of the fork server of the commands that submit and compile jobs."""

from __future__ import annotations

import importlib

for name in ("azure.ai.ml", "azureml_elastic.cli", "azureml_elastic.submit.client", "azureml_elastic.submit.job"):
    importlib.import_module(name)
for name in ("compiled_file", "job_file"):
    importlib.import_module(f"azureml_elastic.submit.yaml.{name}")
