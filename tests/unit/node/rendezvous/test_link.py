"""Pauses of this process and silence of others: which of the two ends a connection."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import MessageClient, MessageServer, listen
from azureml_elastic.ipc.agent_messages import RanksConnecting
from azureml_elastic.node.core.events import HubSent, LinkEnded
from azureml_elastic.node.core.messages import CODEC, MemberHello, RoundChanged
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.link import AgentMessage, FromLink, Link
from tests.support.rendezvous.hubs import PausableRuntime, hub_at, make_context, start_hub
from tests.support.waiting import until


def client_of(hub, node, *callbacks):
    authenticator = make_context(node=node).authenticator
    return MessageClient(("127.0.0.1", hub.port), *callbacks, authenticator=authenticator)


@pytest.mark.parametrize(("pause_s", "given_up"), [(0.0, False), (0.6, False), (1.0, True), (60.0, True)])
def test_a_link_reports_whether_its_own_process_was_paused_for_too_long(pause_s, given_up):
    """The hub may give up after 1 s without a message, and the last one may have been sent a quarter before."""
    listener = listen(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    authenticator = make_context().authenticator
    server = MessageServer(listener, lambda *_: None, lambda _: None, authenticator=authenticator)
    runtime = PausableRuntime()
    runtime.clock = lambda: runtime.offset  # no pause of this process counts
    context = make_context(runtime=runtime)
    link = Link(context, hub_at(port), MemberHello(1))
    try:
        until(lambda: server.connections)
        runtime.offset = pause_s
        server.close()
        assert context.queue.wait(60)
        assert link.broken
        assert context.queue.take() == [FromLink(link, LinkEnded(was_given_up=given_up))]
    finally:
        link.close()


def test_a_paused_hub_gives_up_only_members_that_stay_silent():
    runtime, timings = PausableRuntime(), RendezvousTimings(join_timeout=timedelta(seconds=50))
    hub = start_hub(make_context(timings, runtime))
    hub.enter(Round(1, "sealed", members=tuple(Member(name, f"i-{name}") for name in ("beating", "silent", "late"))))
    received = threading.Event()
    context = make_context(timings, node="beating")
    beating = Link(context, hub_at(hub.port), MemberHello(1))
    silent = client_of(hub, "silent", lambda *_: received.set())
    try:
        silent.send(CODEC.encode(MemberHello(1)))

        def has_come():
            hub.broadcast(RanksConnecting())
            return received.is_set() and any(isinstance(each, AgentMessage) for each in context.queue.take())

        until(has_come)
        runtime.offset = 60.0  # longer than either is waited for, and than a member has to come
        until(lambda: hub.view().lost)
        assert hub.view().lost == {"silent"}
    finally:
        beating.close()
        silent.close()
        hub.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "member_hello"},
        {"op": "member_hello", "round": "1st"},
        {"op": "round_changed", "round": "not packed"},
        {"op": "report", "body": 5},
        {"op": "report", "body": {"op": "vote", "boundary": "first"}},
        {"op": "x"},
    ],
)
def test_a_hub_closes_connections_that_send_malformed_messages_and_serves_others(fields, caplog):
    hub = start_hub()
    closed = threading.Event()
    client = client_of(hub, "x", lambda *_: None, lambda _: closed.set())
    try:
        client.send(fields)
        assert closed.wait(60)
        assert "sent a malformed message" in caplog.text
        context = make_context()
        link = Link(context, hub_at(hub.port), MemberHello(1))
        until(lambda: FromLink(link, HubSent(RoundChanged(None))) in context.queue.take())
        link.close()
    finally:
        client.close()
        hub.close()
