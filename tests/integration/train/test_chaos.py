"""Processes killed at random times in a run that saves continuously."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import time
from contextlib import suppress

import pytest

from azureml_elastic.ipc import MessageServer, listen
from tests.support.train import workers
from tests.support.worlds import TIMEOUT_S, World


def committed(folder):
    with suppress(FileNotFoundError):
        return json.loads((folder / "latest.json").read_text())["step"]
    return 0


@pytest.mark.chaos
def test_kills_at_any_moment_lose_no_committed_step(tmp_path):
    folder, moments, before = tmp_path / "c", random.Random(4), 0
    for _ in range(5):
        world = World(1, workers.train_each_saved, folder)
        deadline = time.monotonic() + TIMEOUT_S
        while committed(folder) < before + 3 and time.monotonic() < deadline:
            time.sleep(moments.uniform(0.001, 0.01))
        time.sleep(moments.uniform(0, 0.02))  # any moment of a save, which takes about as long
        os.kill(world.processes[0].pid, signal.SIGKILL)
        (outcome,) = world.outcomes()
        assert outcome.code == -signal.SIGKILL, outcome.error
        assert committed(folder) >= before + 3
        before = committed(folder)
    (last,) = World(1, workers.train_steps, folder, before // 7 + 1).values()
    assert last["first"] == before
    (undisturbed,) = World(1, workers.train_steps, tmp_path / "u", before // 7 + 1).values()
    assert last["weights"] == undisturbed["weights"]


def test_a_forked_child_does_not_hide_its_parents_death(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    gone = queue.Queue()
    server = MessageServer(listen(str(tmp_path / "s")), lambda *_: None, gone.put)
    world = World(1, workers.connect_fork_and_die, server.address, str(fifo))
    with fifo.open("wb"):  # opens when the child reads; the child ends when this closes
        assert gone.get(timeout=TIMEOUT_S).reason
    assert [outcome.code for outcome in world.outcomes()] == [9]
    server.close()
    assert gone.empty()
