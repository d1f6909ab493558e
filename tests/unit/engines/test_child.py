"""The end of an engine's process, with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from contextlib import closing

import psutil
import pytest

from azureml_elastic.engines.child import Child
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST
from tests.support.paths import ROOT
from tests.support.train.fake_agent import FakeAgent
from tests.support.waiting import until

MARK = "TESTED_CHILD"
DAEMON = """
import os, signal, sys, time
def daemon():
    if os.fork():
        os.wait()
    else:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
"""
STARTS_A_DAEMON = DAEMON + "daemon(); print('started', flush=True); time.sleep(60)"
LEAVES_A_DAEMON = DAEMON + "daemon(); sys.exit(5)"
STARTS_A_DAEMON_WHEN_IT_IS_STOPPED = DAEMON + (
    "signal.signal(signal.SIGTERM, lambda *_: (daemon(), os._exit(6)))\nprint('started', flush=True)\ntime.sleep(60)"
)
HAS_A_GROUP_FOR_EACH_WORKER = DAEMON + (
    "for _ in range(3):\n    if not os.fork():\n        os.setpgrp()\n        time.sleep(60)\n"
    "print('started', flush=True)\ntime.sleep(60)"
)
IGNORES_SIGTERM = DAEMON + (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ndaemon()\nprint('started', flush=True)\ntime.sleep(60)"
)
FORKS_WITHOUT_END = """
import os, time
print('started', flush=True)
while os.fork():
    time.sleep(0.002)
os.setsid()
time.sleep(60)
"""
FORKS_AND_ENDS_AGAIN_AND_AGAIN = """
import os, time
print('started', flush=True)
if os.fork():
    time.sleep(60)
until = time.monotonic() + 60
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.005)
"""
ALL = {name: value for name, value in dict(globals()).items() if isinstance(value, str) and "print('started'" in value}
ENGINE = """
import sys, time
from azureml_elastic.engines.child import Child
from azureml_elastic.engines.engine import NodeEngine
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.channel import ChannelAgent
agent = ChannelAgent(sys.argv[1], WorkerIdentity(0, 0, 0, 0), stays=True)
NodeEngine(None, agent)
child = Child([sys.executable, "-c", sys.argv[2]], {})
time.sleep(60)
"""


@pytest.fixture
def mark(monkeypatch):
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    for process in marked(value):
        with contextlib.suppress(psutil.Error):
            process.kill()


def marked(value):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get(MARK) == value
                and process.status() != psutil.STATUS_ZOMBIE
                and process.pid != os.getpid()
            ):
                found.append(process)
    return found


@pytest.fixture
def start(mark, capfd):
    """Return a function that starts a child with some code, and waits until it has started all."""

    def started(code):
        child = Child([sys.executable, "-c", code], {})
        until(lambda: "started" in capfd.readouterr().out)
        return child

    return started


@pytest.fixture
def engine(mark, tmp_path):
    """Return a function that starts an engine's process, as an agent does, with a child that runs some code."""
    with closing(FakeAgent(tmp_path / "agent")) as agent, contextlib.ExitStack() as stack:

        def started(code):
            command = [sys.executable, "-c", ENGINE, agent.path, code]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, cwd=ROOT)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout.readline() == b"started\n"
            process.agent = agent
            return process

        yield started


@pytest.mark.parametrize("code", ALL.values(), ids=ALL)
def test_nothing_is_left_of_a_process_that_is_killed(start, mark, code):
    start(code).stop(0)
    assert not marked(mark)


@pytest.mark.parametrize("code", ALL.values(), ids=ALL)
def test_nothing_is_left_of_a_process_that_is_stopped(start, mark, code):
    start(code).stop(0.5)
    assert not marked(mark)


def test_nothing_is_left_of_a_process_that_starts_others_while_it_is_killed(start, mark):
    for _ in range(3):
        child = start(FORKS_WITHOUT_END)
        until(lambda: len(marked(mark)) >= 20)
        child.stop(0)
        assert not marked(mark)


def test_nothing_is_left_of_a_process_that_has_ended_by_itself(mark):
    child = Child([sys.executable, "-c", LEAVES_A_DAEMON], {})
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 5
    assert not marked(mark)


def test_what_cleans_up_after_a_process_that_ended_well_has_time_to(mark, tmp_path):
    code = DAEMON + ("if os.fork() == 0:\n    os.setsid()\n    time.sleep(0.5)\n    open(sys.argv[1], 'w').close()")
    child = Child([sys.executable, "-c", code, str(tmp_path / "cleaned")], {})
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 0
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("code", [STARTS_A_DAEMON, HAS_A_GROUP_FOR_EACH_WORKER], ids=["daemon", "groups"])
def test_nothing_is_left_when_the_connection_of_an_engine_to_its_agent_has_ended(engine, mark, code):
    process = engine(code)
    process.agent.server.close()
    assert process.wait(60) == EXIT_AGENT_LOST
    assert not marked(mark)


@pytest.mark.parametrize("code", [STARTS_A_DAEMON, HAS_A_GROUP_FOR_EACH_WORKER], ids=["daemon", "groups"])
def test_nothing_is_left_when_the_group_of_an_engine_is_killed(engine, mark, code):
    process = engine(code)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    until(lambda: not marked(mark), timeout=20)  # nobody waits for the kills; one that is left would stay for a minute


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV)],
)
def test_the_exit_code_is_named_as_in_a_shell(mark, code, expected):
    child = Child([sys.executable, "-c", code], {})
    until(lambda: child.exit_code is not None)
    assert child.exit_code == expected


def test_a_command_that_cannot_be_started_says_so(mark, capfd):
    child = Child(["./nothing-of-this-name"], {})
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 127
    assert "error: ./nothing-of-this-name cannot be started: [Errno 2]" in capfd.readouterr().err


def test_a_signal_to_a_programs_own_group_ends_that_program_alone(start, mark):
    child = Child([sys.executable, "-c", "import os; os.killpg(os.getpgrp(), 9)"], {})
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 128 + signal.SIGKILL


def test_a_program_has_the_signals_of_a_new_process(mark, tmp_path):
    blocked_and_ignored = "grep -E 'Sig(Blk|Ign)' /proc/self/status > $0"
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = Child(["sh", "-c", blocked_and_ignored, str(tmp_path / "signals")], {})
        until(lambda: child.exit_code is not None)
    finally:
        signal.signal(signal.SIGTERM, before)
    blocked, ignored = (int(line.split()[1], 16) for line in (tmp_path / "signals").read_text().splitlines())
    assert blocked == 0
    assert not ignored & (1 << (signal.SIGTERM - 1) | 1 << (signal.SIGPIPE - 1))
