"""A node's channel to its workers, without the node."""

from __future__ import annotations

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.ipc import KEY_BYTES, Authenticator, Peer
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.shard_transfer import ShardSender
from azureml_elastic.node.core.hangs import HangPolicy
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.hangs.detector import HangDetector


def open_channel(recorder):
    """Return a channel that nothing is woken by."""
    memory = AgentMemory()
    sender = ShardSender(memory, Authenticator(Peer("node-0", "inc"), "hub", bytes(KEY_BYTES)))
    return Channel(recorder, EventQueue(), HangDetector(HangPolicy()), memory, sender)
