"""What a dump of stacks says of where the main thread waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_elastic.node.failures.classification import FailedWorker
from azureml_elastic.node.failures.tracebacks import ExceptionInfo, Frame, ParsedError
from azureml_elastic.node.hangs.waiting import waited_lines, whereabouts

SITE = "/usr/lib/python3.11/site-packages"
C10D = f'  File "{SITE}/torch/distributed/distributed_c10d.py", line'
WRAPPER = f'  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper'
MAIN = '  File "/job/train.py", line 40 in main\n  File "/job/train.py", line 50 in <module>'


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        (
            (f"{C10D} 5356 in barrier", WRAPPER, '  File "/job/save.py", line 7 in save', MAIN),
            "waits in barrier, called at /job/save.py:7 in save",
        ),
        (
            (f"{C10D} 3252 in all_gather", WRAPPER, f"{C10D} 3100 in all_gather_object", WRAPPER, MAIN),
            "waits in all_gather_object, called at /job/train.py:40 in main",
        ),
        (
            (
                f'  File "{SITE}/torch/autograd/graph.py", line 824 in _engine_run_backward',
                f'  File "{SITE}/accelerate/accelerator.py", line 2800 in backward',
                MAIN,
            ),
            "is in backward, called at /job/train.py:40 in main",
        ),
        ((MAIN,), "is at /job/train.py:40 in main"),
        ((f"{C10D} 5356 in barrier",), ""),
        ((), ""),
    ],
    ids=["a collective", "one that calls another", "a call", "the program's own line", "no line of it", "no stacks"],
)
def test_the_collective_and_the_line_of_the_program_are_named(frames, where):
    other = "Thread 0x2 (most recent call first):\n" + f"{C10D} 1 in all_reduce\n{MAIN}"
    text = "\n".join(("Main thread 0x1 (most recent call first):", *frames)) + "\n\n" + other
    assert whereabouts(text) == where


def test_a_line_names_each_worker_that_has_waited_in_a_collective():
    step = Frame("/job/train.py", 9, "step")
    inside = Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
    raised = {2: (step, inside), 1: (step,), 0: None}
    failures = {
        rank: FailedWorker(1, 0, Path("none"), frames and ParsedError("", (ExceptionInfo("RuntimeError", "", frames),)))
        for rank, frames in raised.items()
    }
    assert waited_lines(failures) == "rank 2 waits in all_reduce, called at /job/train.py:9 in step\n"
