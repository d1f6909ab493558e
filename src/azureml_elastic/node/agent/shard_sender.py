"""Sends snapshot shards to the agents of other nodes; the protocol is in :mod:`.shard_receiver`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc import Authenticator, Peer
from azureml_elastic.ipc.connection import MessageStream
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.ipc.worker_messages import Accepted, Refused, ReplicateShard, Reply
from azureml_elastic.node.agent.shard_receiver import MAX_TRANSFERS, PIECE_BYTES, TIMEOUT_SECONDS
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.round import Member

__all__ = ["ShardSender"]

_LOG = logging.getLogger(__name__)


class ShardSender:
    """The sending side of one node. Thread-safe.

    Args:
        memory: memory of the agent, which holds the shards.
        authenticator: this node's part in the handshakes with other nodes.
        timeout: seconds that each wait for a receiver may take.
    """

    def __init__(self, memory: AgentMemory, authenticator: Authenticator, timeout: float = TIMEOUT_SECONDS) -> None:
        self._memory = memory
        self._authenticator = authenticator
        self._timeout = timeout
        self._lock = threading.Lock()
        self._members: Sequence[Member] = ()
        self._streams: set[MessageStream] = set()
        self._pool = ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="shard-sender")

    def begin(self, members: Sequence[Member]) -> None:
        """End the transfers under way and send to these members from now on, the nodes of a round in rank order."""
        with self._lock:
            self._members = members
            for stream in self._streams:
                stream.interrupt()

    def submit(self, request: ReplicateShard, reply: Callable[[Reply], None]) -> None:
        """Send a shard in the background, and reply once the other agent holds it or it could not be sent."""
        with self._lock:
            members = self._members
        self._pool.submit(self._serve, request, members, reply)

    def close(self) -> None:
        """End all transfers; returns when their threads have ended."""
        self.begin(())
        self._pool.shutdown(cancel_futures=True)

    def _serve(self, request: ReplicateShard, members: Sequence[Member], reply: Callable[[Reply], None]) -> None:
        try:
            member = _member_of(members, request.rank)
            descriptor, shard = self._memory.open_shard(request.folder, request.file)
            try:
                self._send(descriptor, shard, member, members)
            finally:
                os.close(descriptor)
        except (OSError, ValueError, ElasticError) as error:
            reply(Refused("unavailable", f"The shard was not sent to the node of rank {request.rank}: {error}"))
        except Exception as error:  # noqa: BLE001 - the worker waits for the reply
            _LOG.exception("Sending the shard %s of snapshot %s failed.", request.file, request.folder)
            reply(Refused("unavailable", f"The shard was not sent to the node of rank {request.rank}: {error!r}"))
        else:
            reply(Accepted())

    def _send(self, descriptor: int, shard: ShardDescription, member: Member, members: Sequence[Member]) -> None:
        to = Peer(member.node, member.incarnation)
        stream = MessageStream.connect((member.host, member.hub_port), self._authenticator, to, self._timeout)
        try:
            with self._lock:
                if members is not self._members:
                    raise ConnectionError("the round is over")
                self._streams.add(stream)
            _transfer(stream, descriptor, shard)
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()


def _member_of(members: Sequence[Member], rank: int) -> Member:
    """Return the node of a rank.

    Raises:
        ElasticError: no node has such a rank.
    """
    first = 0
    for member in members:
        first += member.slots
        if rank < first:
            return member
    raise ElasticError(f"there is no rank {rank} among the {first} of this node's round")


def _transfer(stream: MessageStream, descriptor: int, shard: ShardDescription) -> None:
    """Send a shard over a connection to the hub of another node.

    Raises:
        OSError: the connection failed, or the other end is not who it should be.
        ElasticError: the other agent refuses the shard.
    """
    stream.send(messages.CODEC.encode(messages.ShardOffer(shard)))
    _answer(stream, messages.ShardReady)
    stream.secure(is_server=False)
    total = shard.size + shard.tail
    with memoryview(bytearray(min(PIECE_BYTES, total))) as buffer:
        for begin in range(0, total, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, total - begin)]
            if os.preadv(descriptor, [piece], begin) != len(piece):
                raise OSError(f"the memory of the shard ends before its {total} bytes")
            stream.send_bytes(piece)
    _answer(stream, messages.ShardHeld)


def _answer(stream: MessageStream, expected: type[messages.Message]) -> None:
    """Wait for a message of this type; heartbeats and changes of the round may come before.

    Raises:
        OSError: the connection failed.
        ElasticError: the other agent refuses the shard.
    """
    while not isinstance(message := messages.CODEC.decode(stream.receive()), expected):
        if isinstance(message, messages.ShardRefused):
            raise ElasticError(f"it refuses the shard, because {message.reason}")
