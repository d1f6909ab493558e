"""SIGTERM to all processes of a container, with real processes: which survive, which end, and none is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.ipc import MessageServer, listen
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST
from tests.support.node_server import Script, run_script
from tests.support.paths import SUPPORT
from tests.support.worlds import store_on_a_free_port

SCRIPT = SUPPORT / "train" / "loading.py"
TIMEOUT_S = 200.0
METHODS = ("fork", "spawn", "forkserver")


class Agent:
    """The agent's side of the channel for one worker, which it starts as torch's launcher does."""

    def __init__(self, folder, *arguments):
        self.step = 0
        self.said = []
        self._margin = 20
        self._more = threading.Condition()
        self._connection = None
        self._folder = folder
        path = str(folder / "agent")
        self.server = MessageServer(listen(path), self._on_message)
        self._store = store_on_a_free_port()
        torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_USE_AGENT_STORE": True}
        torchrun |= {"MASTER_ADDR": self._store.host, "MASTER_PORT": self._store.port}
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AZUREML_ELASTIC_")},
            **{name: str(value) for name, value in torchrun.items()},
            variables.CHANNEL: path,
            variables.ROUND: "1",
        }
        self.output = folder / "output"
        with self.output.open("w") as output:
            command = [sys.executable, SCRIPT, *arguments]
            self.worker = Script(command, env=environment, stdout=output, stderr=output, session=True)

    def _on_message(self, connection, message):
        with self._more:
            self._connection = connection
            if message["op"] == "step":
                self.step = message["step"]
            elif "id" in message:
                replies = {kind: {"op": f"{kind}_reply"} for kind in ("pointer", "memory")}
                connection.send({"re": message["id"], **replies.get(message["op"], {"op": "accepted"})})
            self.said.append(message["op"])
            if message["op"] == "vote":
                connection.send({"op": "decide", "boundary": 1, "go": message["ok"]})
                if not message["ok"]:  # the worker had completed that step
                    self._margin *= 2
                    self._propose(message["step"])
            self._more.notify_all()

    def until_step(self, step):
        with self._more:
            reached = self._more.wait_for(lambda: self.step >= step, TIMEOUT_S)
        assert reached, self.output.read_text()

    def leave(self):
        self._propose(self.step)

    def _propose(self, step):
        self._connection.send({"op": "prepare", "boundary": 1, "step": step + self._margin, "action": "leave"})

    def group(self):
        """Return the living processes of the worker's group, the fork server's helper among them."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getpgid(process.pid) == self.worker.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def data_workers(self):
        """Return the ids of torch's data workers, by the name that torch gives them."""
        return {process.pid for process in self.group() if process.name() == "pt_data_worker"}

    def wait(self):
        try:
            return self.worker.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended: {self.output.read_text()}")

    def close(self):
        self.server.close()
        with suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()


def gone(agent):
    deadline = time.monotonic() + 60
    while agent.group() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not agent.group()


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*arguments):
        started.append(Agent(tmp_path, *arguments[:1], str(tmp_path), *arguments[1:]))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


@pytest.mark.parametrize("method", METHODS)
def test_data_workers_and_children_survive_until_the_save_is_done(start, tmp_path, method):
    agent = start(method)
    agent.until_step(5)
    before = agent.data_workers()
    assert len(before) == (2 if method == "fork" else 1)
    main, helper, needed, other = json.loads((tmp_path / "pids").read_text())
    for _ in range(3):
        os.killpg(agent.worker.pid, signal.SIGTERM)
        time.sleep(0.1)
    agent.until_step(agent.step + 30)  # more than what had been prefetched
    assert agent.data_workers() == before
    alive = {process.pid for process in agent.group()}
    assert {main, helper, needed} <= alive
    assert other not in alive  # a program receives the signal
    agent.leave()
    assert agent.wait() == 0, agent.output.read_text()
    assert "commit" in agent.said
    assert agent.said[-1] == "stopped"
    assert gone(agent)
    assert "Traceback" not in agent.output.read_text()


@pytest.mark.parametrize("method", METHODS)
def test_a_cut_worker_takes_everything_along(start, tmp_path, method):
    agent = start(method)
    agent.until_step(3)
    assert len(agent.group()) >= 6
    os.killpg(agent.worker.pid, signal.SIGTERM)
    agent.server.close()
    assert agent.wait() == EXIT_AGENT_LOST
    assert gone(agent)


@pytest.mark.parametrize("method", METHODS)
def test_data_workers_do_not_outlive_a_killed_worker(start, method):
    agent = start(method)
    agent.until_step(3)
    workers = agent.data_workers()
    agent.worker.kill()
    agent.worker.wait()
    deadline = time.monotonic() + 60
    while agent.data_workers() & workers:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_without_its_parent_can_be_ended(start, tmp_path):
    agent = start("fork")
    agent.until_step(3)
    _, helper, _, _ = json.loads((tmp_path / "pids").read_text())
    process = psutil.Process(helper)
    os.kill(helper, signal.SIGTERM)
    time.sleep(0.3)
    assert process.is_running()
    agent.worker.kill()
    agent.worker.wait()
    os.kill(helper, signal.SIGTERM)
    with suppress(psutil.NoSuchProcess):
        process.wait(300)


@pytest.mark.parametrize("method", METHODS)
def test_the_parent_of_a_process_can_end_it(tmp_path, method):
    done = run_script([sys.executable, SCRIPT, method, tmp_path, "--ends"], timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    expected = {
        "terminated": -signal.SIGTERM,
        "handled": [3, "expected"],
        "program": [0, str(-signal.SIGTERM)],
        "pool": [1, 4, 9],
        "own program": -signal.SIGTERM,
    }
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 3


def run_code(folder, code):
    script = folder / "script.py"
    script.write_text(code)
    return run_script([sys.executable, script], timeout=TIMEOUT_S)


def test_a_handler_of_the_script_stays_and_threads_change_nothing(tmp_path):
    code = (
        "import signal, threading\n"
        "from azureml_elastic.train.agent_client.channel import leave_sigterm_to_the_agent\n"
        "thread = threading.Thread(target=leave_sigterm_to_the_agent)\n"
        "thread.start(); thread.join()\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "def mine(*_): raise SystemExit(5)\n"
        "signal.signal(signal.SIGTERM, mine)\n"
        "leave_sigterm_to_the_agent()\n"
        "assert signal.getsignal(signal.SIGTERM) is mine\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    done = run_code(tmp_path, code)
    assert done.returncode == 5, done.stderr


def test_a_foreign_group_is_never_ended(tmp_path):
    code = (
        "import os, subprocess\n"
        "from azureml_elastic.train.agent_client.channel import end_group\n"
        "assert os.getpgrp() != os.getpid()\n"
        "other = subprocess.Popen(['sleep', '1000'])\n"
        "end_group()\n"
        "assert other.poll() is None\n"
        "other.kill()\n"
        "other.wait()\n"
    )
    done = run_code(tmp_path, code)
    assert done.returncode == 0, done.stderr
