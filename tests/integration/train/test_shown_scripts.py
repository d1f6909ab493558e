"""The scripts in the documentation resume from a checkpoint that was taken at the end of an epoch."""

from __future__ import annotations

import os
import re
import sys

import pytest

from azureml_elastic.cli.init import starter_files
from azureml_elastic.config import CheckpointPolicy, ElasticResources, Plan
from azureml_elastic.environment import names
from tests.support.node_server import run_script
from tests.support.paths import ROOT, SUPPORT

INTERRUPTED = SUPPORT / "interrupted.py"
EPOCHS = {
    "docs/index.md": 29,
    "starter": 30,
    "samples/digits.py": 23,
    "samples/fsdp2.py": 29,
    "samples/hsdp.py": 29,
    "samples/onnx_runtime.py": 20,
    "src/azureml_elastic/local/demo_train.py": 25,
}
"""The steps of one."""


def source(shown):
    """Return the script, from the page or file that shows it."""
    if shown == "starter":
        return starter_files()["src/train.py"]
    text = (ROOT / shown).read_text()
    if shown.endswith(".py"):
        return text
    (script,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "run.epochs" in block)
    assert "run.epochs(10)" in script
    return script.replace("run.epochs(10)", "run.epochs(2)")


@pytest.mark.parametrize(
    "shown", [pytest.param(each, marks=pytest.mark.shards_on_cpus) if "sdp" in each else each for each in EPOCHS]
)
def test_it_goes_on_from_a_checkpoint_at_the_end_of_an_epoch(shown, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(source(shown))
    steps = EPOCHS[shown]
    policy = CheckpointPolicy(path=str(tmp_path / "checkpoints"), every=None, every_steps=steps)
    outside = names.OWN | {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    environment[names.RUN_DIR] = str(tmp_path)
    environment[names.PLAN] = Plan(resources=ElasticResources(max_instance_count=1), checkpoint=policy).to_json()
    arguments = [] if shown.endswith(".md") else ["--epochs", "2"]

    def run(*argv):
        command = [sys.executable, *argv, str(script), *arguments]
        return run_script(command, cwd=tmp_path, env=environment, timeout=600)

    first = run(str(INTERRUPTED), str(steps), policy.path)
    assert first.returncode == -9, first.stderr
    second = run()
    assert second.returncode == 0, second.stderr
