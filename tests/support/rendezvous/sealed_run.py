"""Two nodes in a sealed round, to be attacked."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.ipc import MessageClient
from azureml_elastic.ipc.authentication import Authenticator, Peer
from azureml_elastic.node.agent.shard_transfer import ShardReceiver
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.rendezvous.context import LocalNode, Surroundings
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY, RUN_KEY
from azureml_elastic.node.table import open_table
from tests.support.waiting import until


def encoded(message):
    return messages.CODEC.encode(message)


TIMINGS = RendezvousTimings(
    heartbeat_interval=timedelta(seconds=0.2),
    heartbeat_timeout=timedelta(seconds=60),
    settle_timeout=timedelta(seconds=60),
    rescale_debounce=timedelta(seconds=0.1),
)

SHARD_SECONDS = 5.0
"""Time in which a node that sends a shard, or takes one, must do something."""

SHARD_TRANSFERS = 12
"""Shards that a node receives at the same time."""


class Receiving(Surroundings):
    """An agent that takes the shards of others."""

    def __init__(self, receiver: ShardReceiver) -> None:
        self.receive_shard = receiver.receive


class Run:
    """Two nodes in a sealed round, each with an agent's loop on a thread, and a third one that waits beside it."""

    def __init__(self, path):
        self.table = open_table(TableRendezvous(endpoint=str(path)), "run", NodeEnvironment.read({}))
        self.memories = [AgentMemory() for _ in range(2)]
        self.receivers = [ShardReceiver(memory, SHARD_SECONDS, SHARD_TRANSFERS) for memory in self.memories]
        self.nodes = [
            Rendezvous(
                self.table, LocalNode(f"node-{k}", "127.0.0.1"), Limits(2, 2), TIMINGS, Receiving(self.receivers[k])
            )
            for k in range(2)
        ]
        for node in self.nodes:
            node.announce()
        with ThreadPoolExecutor(2) as pool:
            self.round = next(iter(pool.map(Rendezvous.join, self.nodes))).round
        self.leader = next(node for node in self.nodes if node.machine.leads)
        self.address = ("127.0.0.1", self.leader.hub.port)
        self.row = self.table.get(ROUND_KEY)

    def close(self):
        for node in self.nodes:
            node.shutdown()
        for receiver, memory in zip(self.receivers, self.memories, strict=True):
            receiver.close()
            memory.close()
        self.table.close()

    def connect(self):
        return socket.create_connection(self.address, 10)

    def member(self, name="intruder", incarnation="i-intruder", on_message=lambda *_: None, on_close=lambda _: None):
        """Connect as a process that holds the run's key."""
        key = bytes.fromhex(self.table.get(RUN_KEY).value["key"])
        authenticator = Authenticator(Peer(name, incarnation), "hub", key)
        return MessageClient(self.address, on_message, on_close, authenticator=authenticator)

    def exchange(self):
        """Send a message from the other agent to rank 0's, and return the seconds until it is there."""
        follower = next(node for node in self.nodes if node is not self.leader)
        began = time.monotonic()
        follower.membership.link.send(messages.Report(messages.REPORTS.decode({"op": "leaving"})))
        until(lambda: self.leader.status() and self.leader._driver.take_messages())
        return time.monotonic() - began

    def change_round(self):
        """Reopen the round, let both nodes join the next one, and return the seconds until both have."""
        began = time.monotonic()
        self.leader.round_end.write(Reopen("a test"))
        follower = next(node for node in self.nodes if node is not self.leader)
        until(lambda: follower.status().over)
        with ThreadPoolExecutor(2) as pool:
            self.round = next(iter(pool.map(Rendezvous.join, self.nodes))).round
        seconds = time.monotonic() - began
        self.leader = next(node for node in self.nodes if node.machine.leads)
        self.row = self.table.get(ROUND_KEY)
        return seconds

    def assert_unharmed(self):
        """Check that nothing has changed, and that the agents still receive each other's messages."""
        for node in self.nodes:
            status = node.status()
            assert not status.broken, status
            assert not status.all_done
            assert not status.waiting
        assert self.table.get(ROUND_KEY) == self.row
        assert set(self.leader.hub.view().waiting) == set()
        follower = next(node for node in self.nodes if node is not self.leader)
        follower.membership.link.send(messages.Reached("a sign of life"))
        self.exchange()
