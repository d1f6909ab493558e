"""Workers that are started plainly attach the integrations by Python's start-up hook, and leave no trace of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from azureml_elastic.config import environment as variables
from azureml_elastic.node.preload.stack_imports import ATTACHMENTS, for_plain_start

SHOW = """
import json, os, sys
import transformers.trainer_utils
kind = transformers.trainer_utils.newest()
print(json.dumps([os.environ.get("PYTHONPATH"), sys.path, "hidden" in sys.modules, kind]))
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts an interpreter which imports a package of the stack's name."""
    package = tmp_path / "stack" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "trainer_utils.py").write_text(
        "def get_last_checkpoint(folder): return 'its own'\ndef newest(): return type(get_last_checkpoint).__name__\n"
    )
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "hidden.py").write_text("")
    (hidden / "sitecustomize.py").write_text("import hidden\n")
    path = os.pathsep.join([str(tmp_path / "stack"), str(hidden), os.environ.get("PYTHONPATH", "")])

    def run(**environ):
        wanted = for_plain_start({**os.environ, "PYTHONPATH": path, variables.CHANNEL: "/nowhere", **environ})
        shown = subprocess.run([sys.executable, "-c", SHOW], env=wanted, capture_output=True, text=True, check=True)
        return path, json.loads(shown.stdout)

    return run


def test_the_integration_is_attached_and_the_path_is_the_scripts(start):
    path, (found, entries, hidden, kind) = start()
    assert found == path.rstrip(os.pathsep)
    assert not any(entry.endswith("plain_start") for entry in entries)
    assert hidden, "the environment's own sitecustomize runs"
    assert kind == "FunctionWrapper"


@pytest.mark.parametrize("environ", [{variables.INTEGRATIONS: "off"}])
def test_it_is_not_attached_where_it_is_switched_off(start, environ):
    assert start(**environ)[1][3] == "function"


def test_each_attachment_exists():
    for module, function in ATTACHMENTS.values():
        imported = __import__(f"azureml_elastic.train.integrations.{module}", fromlist=[function])
        assert callable(getattr(imported, function))
