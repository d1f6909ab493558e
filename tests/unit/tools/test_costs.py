"""The plugin that measures the CPU time of this project's tests and ends those that hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.support.costs.meter import Sampler, open_meter
from tests.support.costs.watch import FreeTime, Limits, share_of_a_core
from tests.support.paths import ROOT

pytest_plugins = ["pytester"]

BUSY = "import time\nwhile time.process_time() < {seconds}: pass\n"
"""A program that uses CPU time."""
AT_LEAST = 0.98
"""CPU seconds that are seen of a program that uses one: the kernel counts in ticks of 10 ms, and of sums the last digit
is rounded."""
KILLED = f"""
import subprocess, sys
PROGRAM = {BUSY.format(seconds=1) + "print('done', flush=True)" + chr(10) + "time.sleep(1000)"!r}

def test_kills_a_busy_child():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as child:
        assert child.stdout.read(4) == b"done"
        child.kill()

def test_does_nothing():
    pass
"""
STUBBORN = """
import pytest, time
from tests.support.costs import watch
watch.GRACE_S = 1.0

@pytest.mark.limits(wait_s=1)
def test_is_stubborn():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
"""
FORKED = """
import os, time

def fork():
    if os.fork() == 0:  # it has the pipe to the process that xdist's workers report to
        time.sleep(1000)
        os._exit(0)
"""
LOCKED = f"""
import re
from tests.support.costs import watch
watch.LOCKED_S = 2.0
{FORKED}

def test_keeps_the_lock():
    fork()
    time.sleep(3 * watch.INTERVAL_S)  # the time set above counts from the next look on
    re.match(r"(a+)+$", "a" * 60 + "b")

def test_does_nothing():
    pass
"""


@pytest.fixture
def tests(pytester, monkeypatch):
    """Return a function that runs tests with the plugin, and returns the result."""
    pytester.makeconftest('pytest_plugins = ["tests.support.costs.plugin"]')
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(source, *arguments):
        pytester.makepyfile(source)
        # Not in this process, which is watched already.
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:azureml-elastic", *arguments)

    return run


def number(result, line):
    """Return the number in the line of the output that matches."""
    return float(next(found[1] for text in result.outlines if (found := re.search(line, text))))


def test_what_waits_or_loops_for_ever_fails_and_shows_where_each_thread_is(tests):
    source = """
        import subprocess, sys, threading, time, pytest

        @pytest.fixture
        def thing():
            yield
            print("torn down")

        @pytest.mark.limits(wait_s=1)
        def test_waits(thing):
            def deep_in_a_thread():
                time.sleep(1000)
            threading.Thread(target=deep_in_a_thread, daemon=True).start()
            threading.Event().wait()

        @pytest.mark.limits(cpu_s=1)
        def test_loops():
            while True:
                pass

        @pytest.mark.limits(cpu_s=1)
        def test_waits_for_a_loop():
            subprocess.run([sys.executable, "-c", "while True: pass"])

        def test_takes_less():
            time.sleep(2)
    """
    result = tests(source, "--strict-markers")
    result.assert_outcomes(failed=3, passed=1)
    text = result.stdout.str()
    assert "test_waits was ended: for 1 of 1 s a core was free for it" in text
    assert "in deep_in_a_thread" in text
    assert "in test_waits" in text
    assert "torn down" in text
    assert re.search(r"test_loops was ended: it has used \d of 1 CPU seconds", text)
    assert re.search(r"test_waits_for_a_loop was ended: it has used \d of 1 CPU seconds", text)
    assert re.search(r"process \d+ \(.\), \d+\.\d CPU seconds: .* -c while True: pass", text)


def test_a_process_that_cannot_be_interrupted_ends_and_shows_why(tests):
    result = tests(STUBBORN)
    assert result.ret == 1
    assert "It has not ended, so this process does." in result.stderr.str()
    assert "in test_is_stubborn" in result.stderr.str()


def test_a_call_that_keeps_the_interpreters_lock_ends_with_the_process_and_shows_where(tests):
    result = tests(LOCKED, "-n", "1")
    result.assert_outcomes(passed=1, failed=1)
    assert "in test_keeps_the_lock" in result.stderr.str()


def test_a_thread_that_never_ends_does_not_keep_the_process(tests):
    source = """
        import threading
        from tests.support.costs import watch
        watch.LOCKED_S = 2.0

        def test_leaves_a_thread():
            threading.Thread(target=threading.Event().wait).start()
    """
    assert "1 passed" in tests(source).stdout.str()


def test_the_dearest_tests_are_shown_with_killed_children(tests):
    result = tests(KILLED)
    result.assert_outcomes(passed=2)
    assert 1.0 <= number(result, r"^ *(\d+\.\d) .*::test_kills_a_busy_child$") < 10.0
    assert "::test_does_nothing" not in result.stdout.str()
    assert number(result, r"^CPU seconds of all: (\d+) ") >= 1


def test_workers_tell_what_their_tests_cost_and_one_that_hangs_is_replaced(tests):
    result = tests(KILLED + FORKED + STUBBORN.replace("    while True", "    fork()\n    while True"), "-n", "1")
    result.assert_outcomes(passed=2, failed=1)
    assert 1.0 <= number(result, r"^ *(\d+\.\d) .*::test_kills_a_busy_child$") < 10.0
    assert number(result, r"^CPU seconds of all: (\d+) ") >= 2
    assert "in test_is_stubborn" in result.stderr.str()


def test_no_control_group_is_left():
    meter = open_meter(f"tests-of-the-meter-{os.getpid()}")
    folder = getattr(meter, "folder", None)
    meter.close()
    assert folder is None or not folder.exists()


def test_where_no_group_can_be_made_children_count_while_they_run_and_once_they_were_waited_for():
    meter = Sampler()
    before = meter.seconds()
    program = f"{BUSY.format(seconds=1)}print('done', flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout.read(4) == b"done"
        assert AT_LEAST <= meter.seconds() - before < 10.0
        child.kill()
    assert AT_LEAST <= meter.seconds() - before < 10.0


@pytest.mark.parametrize(("runnable", "share"), [(0, 1.0), (1, 1.0), (2, 1.0), (4, 0.5), (8, 0.25), (80, 0.25)])
def test_a_second_counts_as_far_as_a_core_was_free(runnable, share):
    assert share_of_a_core(runnable, cores=2) == share


def test_free_time_passes_no_faster_than_time():
    began = time.monotonic()
    free = FreeTime()
    time.sleep(0.2)
    assert 0.0 < free.seconds() <= time.monotonic() - began


@pytest.mark.parametrize(
    ("cpu_s", "free_s", "said"),
    [(9, 19, None), (10, 0, "it has used 10 of 10 CPU seconds"), (0, 20, "for 20 of 20 s a core was free for it")],
)
def test_either_limit_ends_a_test(cpu_s, free_s, said):
    found = Limits(cpu_s=10, free_s=20).exceeded(cpu_s, free_s)
    assert found == said if said is None else found.startswith(said)
