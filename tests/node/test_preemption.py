"""The notice to leave, as signals bring it."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest

from azureml_elastic.node.preemption import Preemption


@pytest.fixture
def preemption():
    woken = threading.Event()
    made = Preemption(timedelta(0), woken.set)
    made.woken = woken
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    made.listen()
    yield made
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_notice(preemption, signum, code):
    assert not preemption.noticed
    assert not preemption.overdue
    os.kill(os.getpid(), signum)
    assert preemption.woken.wait(10)
    assert preemption.noticed
    assert preemption.overdue  # no grace
    assert (preemption.exit_code, preemption.reason) == (code, signum.name)


def test_a_storm_of_signals_while_the_wake_is_used_deadlocks_nobody(preemption):
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=storm)
    thread.start()
    for _ in range(2000):
        preemption.woken.wait(0.0001)
        preemption.woken.clear()
    stop.set()
    thread.join()
    assert preemption.noticed
