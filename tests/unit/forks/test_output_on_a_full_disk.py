"""No print ends training: what a full disk does not take of a worker's output is dropped, and counted in the file."""

from __future__ import annotations

import subprocess
import sys

WORKER = """
import os, sys
from azureml_elastic.forks.script_runner import adopt_descriptors
adopt_descriptors(os.open("/dev/full", os.O_WRONLY), os.dup(2))
print("x" * 100_000, flush=True)
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)  # there is space again
print("step 2", flush=True)
print("step 3", flush=True)
"""


def test_a_print_to_a_full_disk_does_not_raise(tmp_path):
    subprocess.run([sys.executable, "-c", WORKER, tmp_path / "stdout.log"], check=True, timeout=60)
    assert (tmp_path / "stdout.log").read_text().split("\n")[1:] == [
        "[100001 bytes of output were dropped]",
        "step 2",
        "step 3",
        "",
    ]
