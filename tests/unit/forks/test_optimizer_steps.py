"""What the agent of a worker's node knows of the steps that its script's optimizers take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.optimizer_steps import Steps, ask_to_stop, read_steps
from azureml_elastic.node.agent.saved_files import is_stopped, resume
from tests.support.node_server import Script, run_script
from tests.support.waiting import until

HEAD = """
import os
from azureml_elastic.forks.optimizer_steps import count_steps
count_steps(os.environ)
import torch
import torch.distributed as dist

def make():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight])

def loss():
    return torch.nn.Parameter(torch.ones(1)).sum()

def open_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def run(folder: Path, code: str) -> Steps:
    """Run a script as a worker, and return the counts above 0."""
    script = folder / "script.py"
    script.write_text(f"{HEAD}{code}\nprint(os.getpid())")
    environ = {**os.environ, variables.CHANNEL: str(folder / "agent.sock")}
    done = run_script([sys.executable, script], timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    return tuple(count for count in read_steps(folder, [int(done.stdout.split()[-1])]) if count)


CASES = {
    "none": ("", ()),
    "two optimizers": ("optimizer = make()\nfor _ in range(3): optimizer.step()\nmake().step()", (3, 1)),
    "a group": ("optimizer = make()\noptimizer.step()\nopen_group()\noptimizer.step()", (2,)),
    "its group is closed": (
        """
open_group()
optimizer = make()
optimizer.step()
dist.destroy_process_group()
optimizer.step()
make().step()
open_group()
optimizer.step()
""",
        (2,),
    ),
    "a fork": (
        """
optimizer = make()
optimizer.step()
if os.fork() == 0:
    optimizer.step()
    os._exit(0)
os.wait()
""",
        (1,),
    ),
    "many optimizers": (
        "several = [make() for _ in range(100)]\nfor optimizer in several: optimizer.step()",
        (2,) * 36 + (1,) * 28,
    ),
    "an optimizer of its own": ("for _ in range(3): loss().backward()", (3,)),
    "backward passes": (
        """
optimizer = make()
for _ in range(3):
    loss().backward()
    optimizer.step()
    torch.autograd.backward(loss())
""",
        (1, 3),
    ),
    "compiled": ("step = torch.compile(make().step, backend='eager')\nfor _ in range(3): step()", (3,)),
}


@pytest.mark.parametrize(("code", "expected"), CASES.values(), ids=CASES)
def test_steps_are_counted_for_each_optimizer(tmp_path, code, expected):
    assert run(tmp_path, code) == expected


def test_a_worker_that_has_not_begun_has_taken_no_step(tmp_path):
    assert not any(read_steps(tmp_path, [1, 2]))
    (tmp_path / "steps-1").write_bytes(b"torn")
    assert len(read_steps(tmp_path, [1, 2])) == len(read_steps(tmp_path, [3, 4]))


def test_a_worker_that_is_asked_stops_once_after_its_next_step(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}import time\noptimizer = make()\nwhile True:\n    optimizer.step()\n    time.sleep(0.01)")
    environ = {**os.environ, variables.CHANNEL: str(tmp_path / "agent.sock")}
    with (tmp_path / "output").open("wb") as output:
        process = Script([sys.executable, script], env=environ, session=True, stdout=output, stderr=output)
    try:
        until(lambda: any(read_steps(tmp_path, [process.pid])))
        ask_to_stop(tmp_path, process.pid)
        until(lambda: is_stopped(process.pid))
        steps = read_steps(tmp_path, [process.pid])
        resume([process.pid])
        until(lambda: read_steps(tmp_path, [process.pid])[0] > steps[0] + 3)
    finally:
        process.kill()
