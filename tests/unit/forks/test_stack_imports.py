"""Workers that are started plainly attach the integrations by Python's start-up hook, and leave no trace of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.stack_imports import ATTACHMENTS, for_plain_start, is_off

SHOW = """
import json, os, sys
import transformers.trainer_utils
kind = transformers.trainer_utils.newest()
print(json.dumps([os.environ.get("PYTHONPATH"), sys.path, "hidden" in sys.modules, kind]))
"""


@pytest.fixture(params=[True, False], ids=["over another sitecustomize", "alone"])
def hides(request):
    """Return whether the environment has a ``sitecustomize`` of its own."""
    return request.param


@pytest.fixture
def start(tmp_path, hides):
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
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    path = os.pathsep.join([str(tmp_path / "stack"), *([str(hidden)] if hides else []), *inherited])

    def run(**environ):
        wanted = for_plain_start({**os.environ, "PYTHONPATH": path, variables.CHANNEL: "/nowhere", **environ})
        shown = subprocess.run([sys.executable, "-c", SHOW], env=wanted, capture_output=True, text=True, check=True)
        assert not shown.stderr
        return path, json.loads(shown.stdout)

    return run


def test_the_integration_is_attached_and_the_path_is_the_scripts(start, hides):
    path, (found, entries, hidden, kind) = start()
    assert found == path
    assert not any(entry.endswith("plain_start") for entry in entries)
    assert hidden == hides, "the environment's own sitecustomize runs"
    assert kind == "FunctionWrapper"


@pytest.mark.parametrize("environ", [{variables.INTEGRATIONS: "off"}])
def test_it_is_not_attached_where_it_is_switched_off(start, environ):
    assert start(**environ)[1][3] == "function"


def test_an_integration_is_attached_to_all_modules_in_which_it_wraps_functions_and_to_no_others():
    for stack in set(ATTACHMENTS.values()):
        found = importlib.import_module(f"azureml_elastic.train.integrations.{stack}.attachment")
        names = [name for name, other in ATTACHMENTS.items() if other == stack]
        assert callable(found.attach)
        assert all(any(name.endswith(end) for end in found.WRAPPERS) for name in names)
        assert all(any(name.endswith(end) for name in names) for end in found.WRAPPERS)


@pytest.mark.parametrize(("value", "off"), [(None, False), ("", False), ("on", False), ("off", True)])
def test_one_variable_switches_off_all_attachments(value, off):
    environ = {} if value is None else {variables.INTEGRATIONS: value}
    assert is_off(environ) == off
