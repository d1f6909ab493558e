"""Whose fault it is that nothing was heard: that of a machine that stood still, or that of the others."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import LineClient, LineServer, listen
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.hub.messages import CODEC, Hello
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Member, Round
from tests.support.waiting import until


class Later(Runtime):
    """A machine that can stand still: its time goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
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
    machine.clock = lambda: machine.offset  # no pause of this process counts
    link = Link(("127.0.0.1", port), Hello("node", 1), RendezvousTimings(), woken.set, runtime=machine)
    try:
        until(lambda: server.connections)
        if stands_still:
            machine.offset = 60.0
        server.close()
        assert woken.wait(60)
        assert link.broken
        assert link.was_paused == stands_still
    finally:
        link.close()


def test_a_hub_that_stood_still_gives_up_only_who_stays_silent():
    machine, timings = Later(), RendezvousTimings(join_timeout=timedelta(seconds=50))
    hub = Hub("127.0.0.1", timings, lambda: None, runtime=machine)
    hub.enter(Round(1, "sealed", members=tuple(Member(name, name) for name in ("beating", "silent", "late"))))
    here = ("127.0.0.1", hub.port)
    greetings = {name: Hello(name, 1) for name in ("beating", "silent")}
    heard = threading.Event()
    beating = Link(here, greetings["beating"], timings, lambda: None)
    silent = LineClient(here, lambda *_: heard.set())
    try:
        silent.send(CODEC.encode(greetings["silent"]))
        until(lambda: hub.broadcast({"any": "thing"}) or (heard.is_set() and beating.take_broadcasts()))
        machine.offset = 60.0  # longer than either is waited for, and than a member has to come
        until(lambda: hub.view().lost)
        assert hub.view().lost == {"silent"}
    finally:
        beating.close()
        silent.close()
        hub.close()
