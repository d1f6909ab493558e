"""A transport of gloo that torch was built without."""

from __future__ import annotations

import os
import sys

from tests.support.node_server import run_script

SCRIPT = """
from azureml_elastic import train
train.start()
"""


def test_a_transport_that_torch_was_built_without_is_refused_clearly(tmp_path):
    """torch reads the variable once in each process."""
    (tmp_path / "script.py").write_text(SCRIPT)
    outside = ("MASTER_ADDR", "MASTER_PORT", "RANK")
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    environment["GLOO_DEVICE_TRANSPORT"] = "ANOTHER"
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = run_script(command, cwd=tmp_path, env=environment, timeout=120)
    assert ended.returncode != 0
    assert "UsageError: GLOO_DEVICE_TRANSPORT=ANOTHER is not supported" in ended.stderr
