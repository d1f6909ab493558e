"""One end of a connection: what the peer has not taken yet, bounded, and the lines that have arrived."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from azureml_elastic.ipc.authentication import AuthenticationError, Handshake, Peer, Session
from azureml_elastic.ipc.line_codec import LineReader, encode
from azureml_elastic.ipc.message_stream import MessageStream

__all__ = ["CLOSED_BY_PEER", "Connection", "Waker"]

_LOG = logging.getLogger(__name__)
_MAX_UNSENT = 8 << 20
_CHUNK = 1 << 16

CLOSED_BY_PEER = "the peer closed the connection"
"""Reason of an ordinary end."""


class Waker(Protocol):
    """What a connection needs of the thread that serves it."""

    def attend(self, connection: Connection) -> None:
        """Have the thread look at this connection, which has ended, or whose unsent bytes have changed."""


class Connection:
    """One end of a connection. Every method may be called from any thread and returns at once, but ``flush``.

    Args:
        sock: connected; from here on it belongs to this object.
        loop: the thread that serves it.
        handshake: this end's side of the handshake, before which no message is parsed, and no message sent but kept
            until it is complete; ``None`` for a connection without authentication.

    Attributes:
        state: for the owner of the callbacks, unread here.
        last_received: ``time.monotonic()`` of the last bytes from the peer, or of the connection's start.
        reason: why the connection ended, ``""`` while it is open.
        peer: the peer's address, for messages.
        identity: the peer's name and incarnation, once it is authenticated.
        refused: whether this end has ended the connection because the peer does not hold this end's key.
    """

    def __init__(self, sock: socket.socket, loop: Waker, handshake: Handshake | None = None) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.state: dict[str, Any] = {}
        self.last_received = time.monotonic()
        self.reason = ""
        self.peer = "unix" if sock.family == socket.AF_UNIX else "{}:{}".format(*sock.getpeername()[:2])
        self._sock = sock
        self._loop = loop
        self.identity: Peer | None = None
        self.refused = False
        self._handshake = handshake
        self._session: Session | None = None
        self._early: list[bytes] = []
        self._reader = LineReader()
        self._unsent = bytearray()
        self._changed = threading.Condition()
        if handshake is not None:
            self._unsent += handshake.opening

    @property
    def closed(self) -> bool:
        """Whether no more can be sent; ``on_close`` has been called or is about to be."""
        return bool(self.reason)

    @property
    def established(self) -> bool:
        """Whether messages can be exchanged: the peer is authenticated, or need not be."""
        return self._handshake is None

    @property
    def is_proof_refused(self) -> bool:
        """Whether the connection has ended after this end has proved that it holds its key, but the peer has not."""
        return self.closed and self._handshake is not None and self._handshake.has_proved

    def wait_established(self, timeout: float) -> bool:
        """Wait until the handshake is complete and the kernel has what was sent before; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self.reason or self._handshake is None, timeout)
            return self._handshake is None and not self.reason

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send what the socket takes now and leave the rest to the thread.

        Returns:
            False where the connection is closed; the message is dropped, and ``on_close`` tells the owner.
        """
        return self.send_line(encode(message))

    def send_line(self, line: bytes) -> bool:
        """Send an encoded message; see :meth:`send`."""
        with self._changed:
            if self.reason:
                return False
            if self._handshake is not None:
                self._early.append(line)
                return True
            return self._send(line if self._session is None else self._session.seal(line))

    def _send(self, data: bytes) -> bool:
        if not self._unsent:
            try:
                data = data[self._sock.send(data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._end(f"sending failed: {error}")
                return False
        if data:
            self._unsent += data
            if len(self._unsent) > _MAX_UNSENT:
                self._end(f"the peer leaves more than {_MAX_UNSENT} bytes unread")
                return False
            self._loop.attend(self)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until the kernel has taken all that was sent, so that it survives the end of this process.

        Returns:
            False where ``timeout`` seconds were not enough or the connection ended before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.reason or not (self._unsent or self._early), timeout)
            return not (self._unsent or self._early or self.reason)

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection; what the kernel has not taken yet is dropped."""
        with self._changed:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._changed.notify_all()
            self._loop.attend(self)

    def write_unsent(self) -> None:
        """Send more of what waits. For the thread alone."""
        with self._changed:
            if self.reason or not self._unsent:
                return
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(f"sending failed: {error}")
            if not self._unsent:
                self._changed.notify_all()
                self._loop.attend(self)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived. For the thread alone."""
        try:
            data = self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"receiving failed: {error}")
            return
        if not data:
            self.close(CLOSED_BY_PEER)
            return
        self.last_received = time.monotonic()
        if self._handshake is not None:
            data = self._continue_handshake(self._handshake, data)
        messages = self._reader.feed(data)
        while not self.reason:
            try:
                message = next(messages, None)
            except (ValueError, AuthenticationError) as error:
                _LOG.warning("Closing the connection to %s, which sent what is no message: %s.", self.peer, error)
                self.close(f"the peer sent what is no message: {error}")
                return
            if message is None:
                return
            yield message

    def _continue_handshake(self, handshake: Handshake, data: bytes) -> bytes:
        """Pass on what the peer has sent, and return what of it belongs to messages."""
        with self._changed:
            try:
                answer = handshake.feed(data)
            except AuthenticationError as error:
                self.refused = True
                self._end(f"the handshake failed: {error}")
                return b""
            if answer and not self._send(answer):
                return b""
            if handshake.refusal is not None:
                self._end(handshake.refusal)
            if handshake.session is None or self.reason:
                return b""
            self._session = session = handshake.session
            self._handshake = None
            self._reader = LineReader(session.open)
            self.identity = session.peer
            early, self._early = self._early, []
            for line in early:
                self._send(session.seal(line))
            self._changed.notify_all()
            return handshake.take_rest()

    def detach(self, timeout: float) -> MessageStream:
        """End this object, and return its connection as a stream for another thread. For the thread alone.

        Args:
            timeout: seconds that each wait of the stream for the peer may take.
        """
        with self._changed:
            assert self._session is not None, "the connection's handshake is complete"
            stream = MessageStream(
                self._sock.dup(), self._session, timeout, self._reader.take_rest(), bytes(self._unsent)
            )
            self._end("it is served by another thread")
            return stream

    def wants_to_write(self) -> bool:
        """Whether bytes wait for the socket. For the thread alone."""
        return bool(self._unsent)

    @property
    def socket(self) -> socket.socket:
        """For the thread alone."""
        return self._sock
