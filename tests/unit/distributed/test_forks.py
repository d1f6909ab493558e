"""Forked children do not collect the garbage of their parent; each test runs in its own process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import gc, os, threading
seen = []
def note():
    seen.append(gc.isenabled())
os.register_at_fork(after_in_parent=note, after_in_child=note)
from azureml_elastic.distributed.process import freeze_inherited_garbage
freeze_inherited_garbage()
freeze_inherited_garbage()

class Loud:
    def __init__(self):
        self.me = self
    def __del__(self):
        os.write(1, b"collected")

def forked(function):
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def run(script):
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_does_not_collect_inherited_objects():
    assert run("gc.disable(); Loud(); forked(gc.collect); os.write(1, b'-'); gc.collect()") == "-collected"


def test_a_child_collects_its_own_objects():
    script = """
    def use():
        Loud()
        gc.collect()
    forked(use)
    """
    assert run(script) == "collected"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_disabled_during_a_fork_only(enabled):
    script = f"""
    gc.{"enable" if enabled else "disable"}()
    def check():
        assert seen == [False], seen  # a hook that runs before the one under test
        assert gc.isenabled() is {enabled}
    forked(check)
    assert seen == [False], seen
    assert gc.isenabled() is {enabled}
    """
    run(script)


def test_threads_that_fork_at_once_leave_the_collector_on():
    script = """
    def fork_often():
        for _ in range(50):
            forked(lambda: None)
    threads = [threading.Thread(target=fork_often) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert gc.isenabled()
    """
    run(script)


def test_no_garbage_is_collected_while_the_groups_of_a_round_are_released():
    """A group among it was waited for with the GIL, which its threads needed to end: both stood still for ever."""
    script = """
    import types, torch
    from azureml_elastic.distributed.process_groups import ProcessGroups
    allocate = lambda: Loud() and [[] for _ in range(9_000)]
    ProcessGroups(None, torch.device("cpu")).close([types.SimpleNamespace(dissolve=allocate)])
    os.write(1, b"-"); allocate()
    """
    assert run(script).startswith("-collected")
