"""Sends snapshot shards to other nodes' agents, and receives theirs and holds them in memory.

A node that sends a shard connects to this node's hub, where both ends authenticate themselves, and offers the shard.
The hub hands the connection over to a thread, which uses it alone::

    sender → receiver   ShardOffer    description of the shard
    receiver → sender   ShardReady    there is memory; or ShardRefused
                        TLS 1.3 from here on, with a certificate that only the two ends can derive
    sender → receiver   the bytes
    receiver → sender   ShardHeld     the checksum is right and the agent holds the shard; or ShardRefused
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc import Authenticator, Connection, Peer
from azureml_elastic.ipc.connection import MessageStream
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.ipc.worker_messages import Accepted, Refused, ReplicateShard, Reply
from azureml_elastic.memory import available_memory
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.round import Member

_LOG = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
"""Time in which the other end must send or take something."""

PIECE_BYTES = 1 << 20
"""Bytes that are read, encrypted and sent, or received and written, at a time."""

MAX_TRANSFERS = 256
"""Limit of transfers at the same time: there is one per worker."""

_RESERVED_BYTES = 256 << 20
"""Memory that stays available: without it the kernel would end the workers."""


class ShardReceiver:
    """The receiving side of one node. Thread-safe.

    Args:
        timeout: seconds that each wait for the sender may take.
        max_transfers: limit of transfers at the same time; there is one per worker of the sending node.
    """

    def __init__(
        self, memory: AgentMemory, timeout: float = TIMEOUT_SECONDS, max_transfers: int = MAX_TRANSFERS
    ) -> None:
        self._memory = memory
        self._timeout = timeout
        self._max_transfers = max_transfers
        self._lock = threading.Lock()
        self._allocation = threading.Lock()
        self._streams: set[MessageStream] = set()
        self._closed = False
        self._pool = ThreadPoolExecutor(max_transfers, thread_name_prefix="shard-receiver")

    def receive(self, connection: Connection, shard: ShardDescription) -> None:
        """Take over a connection to the hub whose client offers a shard. For the hub's thread."""
        stream = connection.detach(self._timeout)
        with self._lock:
            is_accepted = not self._closed and len(self._streams) < self._max_transfers
            if is_accepted:
                self._streams.add(stream)
                self._pool.submit(self._serve, stream, shard)
        if not is_accepted:
            stream.close()

    def close(self) -> None:
        """End all transfers; returns when their threads have ended."""
        with self._lock:
            self._closed = True
            for stream in self._streams:
                stream.interrupt()
        self._pool.shutdown()

    def _serve(self, stream: MessageStream, shard: ShardDescription) -> None:
        try:
            refusal = self._receive(stream, shard)
            stream.send(messages.CODEC.encode(messages.ShardHeld() if refusal is None else refusal))
        except (OSError, ValueError, ElasticError) as error:
            _LOG.warning("The shard %s of snapshot %s did not arrive: %s", shard.file, shard.folder, error)
        except Exception:  # noqa: BLE001 - nobody waits for this thread's exceptions
            _LOG.exception("Receiving the shard %s of snapshot %s failed.", shard.file, shard.folder)
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()

    def _receive(self, stream: MessageStream, shard: ShardDescription) -> messages.ShardRefused | None:
        """Receive and hold a shard, and return ``None``, or why it is refused."""
        try:
            # One after the other: each looks at what is available before it takes its part, and two at once would both
            # count the same memory.
            with self._allocation:
                descriptor = _allocate(shard.size + shard.tail)
        except (OSError, ElasticError) as error:
            return messages.ShardRefused(f"there is no memory for it: {error}")
        try:
            stream.send(messages.CODEC.encode(messages.ShardReady()))
            stream.secure(is_server=True)
            found = _copy(stream, descriptor, shard)
            if found != shard.xxh3:
                return messages.ShardRefused(f"its checksum is {found}, not {shard.xxh3}: it changed on the way")
            # The memory closes its descriptor in its own time; this one is closed here, whatever has happened.
            self._memory.hold(os.dup(descriptor), shard)
            return None
        finally:
            os.close(descriptor)


def _allocate(size: int) -> int:
    """Return the descriptor of this much memory, which the kernel has set aside.

    Raises:
        OSError: there is not enough.
        MissingExtra: psutil is not installed.
    """
    available, _ = available_memory()
    if size > available - _RESERVED_BYTES:
        raise OSError(f"{size} bytes are needed and {available} available, of which {_RESERVED_BYTES} are reserved")
    descriptor = os.memfd_create("replica", os.MFD_CLOEXEC)
    try:
        # Pages that are missing only when they are written to would bring the kernel to end a process, perhaps a
        # worker.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _copy(stream: MessageStream, descriptor: int, shard: ShardDescription) -> str:
    """Copy a shard and what follows it into memory, and return the shard's checksum."""
    checksum = xxhash.xxh3_128()
    total = shard.size + shard.tail
    with memoryview(bytearray(min(PIECE_BYTES, total))) as buffer:
        for begin in range(0, total, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, total - begin)]
            stream.receive_bytes(piece)
            checksum.update(piece[: max(0, shard.size - begin)])
            os.pwrite(descriptor, piece, begin)
    return checksum.hexdigest()


class ShardSender:
    """The sending side of one node. Thread-safe.

    Args:
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
                # A round that has begun while this connected has interrupted only the streams that were there.
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
