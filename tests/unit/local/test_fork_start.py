"""Which runs have forked nodes, as far as their settings decide."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.forks.import_variables import read_early
from azureml_elastic.forks.process import ForkedProcess
from azureml_elastic.local.fork_start import are_forked
from azureml_elastic.program.command import parse_program


@pytest.mark.parametrize(
    ("words", "settings", "most_nodes", "forked"),
    [
        ("train.py --epochs 3", {}, 2, True),
        ("python -m train", {}, 8, True),
        (f"{sys.executable} train.py", {}, 2, True),
        ("train.py", {}, 1, False),
        ("python -O train.py", {}, 2, False),
        ("/opt/other/python train.py", {}, 2, False),
        ("train.py", {"preload_workers": False}, 2, False),
        ("train.py", {"framework": "dask"}, 2, False),
    ],
)
def test_nodes_are_forked_where_each_would_make_the_same_imports(words, settings, most_nodes, forked):
    assert are_forked(parse_program([words]), ElasticDistribution(**settings), most_nodes) == forked


def test_variables_that_are_read_early_are_those_of_the_interpreter_and_of_libraries():
    early = {"PYTHONPATH": "a", "OMP_NUM_THREADS": "1", "HF_HOME": "b", "TORCH_LOGS": "c"}
    late = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCHELASTIC_RUN_ID": "d", "AZUREML_ELASTIC_PLAN": "{}", "PATH": "e"}
    assert read_early({**early, **late}) == early


def test_a_forked_process_has_the_interface_of_a_started_one():
    read, write = os.pipe()
    command = ["sh", "-c", "read line; exit 7"]
    process = ForkedProcess(
        os.posix_spawn("/bin/sh", command, {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)]), ["node"]
    )
    os.close(read)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired, match=r"\['node'\]"):
        process.wait(0.01)
    os.close(write)
    assert process.wait(60) == process.poll() == process.returncode == 7
    process.terminate()  # it has ended
