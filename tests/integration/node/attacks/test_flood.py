"""5,000 idle connections to the hub of a running round: new nodes are served, and members notice nothing.

``python -m nox -s chaos`` runs it, and ``-s`` shows the figures.
"""

from __future__ import annotations

import resource
import threading
import time

import psutil
import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc.event_loop import HANDSHAKE_SECONDS
from azureml_elastic.node.core import messages
from tests.support.flood import flood
from tests.support.waiting import until

CONNECTIONS = 5000
HEARTBEAT_TIMEOUT = RendezvousTimings().heartbeat_timeout.total_seconds()


def serve_a_spare(run, number):
    """Return the seconds until a hub has answered a spare, which connects again when it is refused, as nodes do."""
    began = time.monotonic()
    over, answered = threading.Event(), threading.Event()

    def answer(*_):
        answered.set()
        over.set()

    while not answered.is_set():
        over.clear()
        spare = run.member(f"spare-{number}", f"i-spare-{number}", answer, lambda _: over.set())
        spare.send(messages.CODEC.encode(messages.Watch(run.round.number)))
        assert over.wait(300)
        seconds = time.monotonic() - began
        spare.close()
    until(lambda: not run.leader.hub.view().waiting)
    return seconds


def measure(run):
    """Return how long spares, messages of a member and a change of the round take at most."""
    spares = max(serve_a_spare(run, number) for number in range(10))
    exchanges = max(run.exchange() for _ in range(50))
    return spares, exchanges, run.change_round()


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@pytest.mark.chaos
@pytest.mark.xdist_group("flood")
@pytest.mark.parametrize("reopens", [False, True], ids=["held", "reopened"])
@pytest.mark.parametrize("addresses", [1, 10])
def test_5000_idle_connections_delay_nobody(run, addresses, reopens):
    """From the nodes' own address, and from ten others; those that the hub closes stay closed, or are opened again."""
    quiet = measure(run)
    process = psutil.Process()
    unauthenticated = run.leader.hub._server._loop._unauthenticated
    memory, used, began = process.memory_info().rss, cpu_seconds(), time.monotonic()
    with flood(run.leader.hub.port, CONNECTIONS, addresses=addresses, reopens=reopens) as flooding:
        opening = time.monotonic() - began
        busy = measure(run)
        held = sum(not connection.closed for connection in list(unauthenticated._since))
        opened, lasted = flooding.opened(), time.monotonic() - began
        used, memory = cpu_seconds() - used, process.memory_info().rss - memory
    run.assert_unharmed()
    assert held <= (512 if addresses == 1 else 1024)
    print(
        f"\n{opened} connections from {addresses} addresses in {lasted:.1f} s (the first {CONNECTIONS} in "
        f"{opening:.2f} s), {held} held by the hub; {used / opened * 1e6:.0f} us CPU each, "
        f"{used / lasted:.0%} of a core; {memory / 1e6:+.1f} MB\n"
        "at most, without -> with the flood: "
        + ", ".join(
            f"{name} {before * 1000:.0f} -> {after * 1000:.0f} ms"
            for name, before, after in zip(("a spare", "a message", "the round's change"), quiet, busy, strict=True)
        )
    )
    spare, message, change = busy
    assert spare < (60 if reopens else HANDSHAKE_SECONDS)
    assert message < HEARTBEAT_TIMEOUT / 2, "members would be taken for lost"
    assert change < (60 if reopens else HANDSHAKE_SECONDS)
    assert memory < 64e6
