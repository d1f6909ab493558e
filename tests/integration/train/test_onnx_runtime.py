"""The sample for ONNX Runtime: with a module that has its interface, and without any."""

from __future__ import annotations

import os
import sys

import pytest

from azureml_elastic.environment import names
from tests.support.node_server import run_script
from tests.support.paths import SAMPLES

SAMPLE = SAMPLES / "onnx_runtime.py"

FAKE_MODULE = '''
"""A module with the interface of ONNX Runtime's: parameters and state have the names of the wrapped model."""
from torch import nn


class ORTModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        object.__setattr__(self, "inner", module)
        for name, child in module.named_children():
            self.add_module(name, child)

    def forward(self, *arguments):
        print("forward by the fake", flush=True)
        return self.inner(*arguments)
'''


def run(folder, path, epochs):
    outside = names.OWN | {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    sample = path / "sample.py"  # what lies beside it is imported
    sample.write_text(SAMPLE.read_text())
    done = run_script([sys.executable, sample, "--epochs", str(epochs)], cwd=folder, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "raise ImportError('made for another torch')",
            "trained by PyTorch, for ONNX Runtime cannot be used (made for",
        ),
        (FAKE_MODULE, "trained by ONNX Runtime"),
    ],
)
def test_the_sample_trains_and_goes_on(tmp_path, module, said):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch_ort.py").write_text(module)
    first = run(tmp_path, tmp_path / "site", 1)
    assert said in first
    assert ("forward by the fake" in first) == (module is FAKE_MODULE)
    assert "epoch 0 step 20" in first
    second = run(tmp_path, tmp_path / "site", 3)
    assert "continuing after step 20" in second
    assert float(second.splitlines()[-1].split()[-2]) > 0.5


def test_a_checkpoint_of_one_continues_in_the_other(tmp_path):
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / "torch_ort.py").write_text(FAKE_MODULE)
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torch_ort.py").write_text("raise ImportError")
    run(tmp_path, tmp_path / "with", 1)
    assert "continuing after step 20" in run(tmp_path, tmp_path / "without", 2)
