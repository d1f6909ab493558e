"""Whose fault it is that a connection ends: that of a machine that stood still, or that of the hub."""

from __future__ import annotations

import threading
import time

import pytest

from azureml_elastic.node.rendezvous.link import Link
from azureml_elastic.node.rendezvous.machine import Machine
from azureml_elastic.spec import RendezvousTimings
from azureml_elastic.wire import LineServer, listen


class Later(Machine):
    """A machine that can stand still: its time goes on meanwhile."""

    def __init__(self) -> None:
        self.offset = 0.0

    def clock(self) -> float:
        return time.monotonic() + self.offset


@pytest.mark.parametrize("stands_still", [True, False])
def test_a_machine_that_stood_still_blames_nobody_else(stands_still):
    listener = listen(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = LineServer(listener, lambda *_: None, lambda _: None)
    woken = threading.Event()
    machine = Later()
    link = Link(("127.0.0.1", port), {"op": "hello"}, RendezvousTimings(), woken.set, machine)
    try:
        until = time.monotonic() + 20
        while not server.connections:
            assert time.monotonic() < until
            time.sleep(0.005)
        if stands_still:
            machine.offset = 60.0
        server.close()
        assert woken.wait(20)
        assert link.broken
        assert link.stood_still == stands_still
    finally:
        link.close()
