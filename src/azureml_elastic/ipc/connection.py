"""The end of a connection that an event loop serves, the one that a thread uses by itself, and the lines of both."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from azureml_elastic.errors import MissingExtra
from azureml_elastic.ipc.authentication import AuthenticationError, Authenticator, Handshake, Peer, Session

if TYPE_CHECKING:
    from azureml_elastic.ipc.event_loop import Loop

_LOG = logging.getLogger(__name__)

# Eight of the longest messages: a peer that leaves more unread hangs, and would fill this process's memory.
_MAX_UNSENT = 8 << 20
_CHUNK = 1 << 16

MAX_LINE = 1 << 20
"""The longest message in bytes, its newline included."""

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the message as one line.

    Raises:
        ValueError: the message is no JSON or its line is longer than :data:`MAX_LINE`.
    """
    line = _to_json(dict(message)).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"A message of {len(line)} bytes exceeds the limit of {MAX_LINE}; send less at a time.")
    return line


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_from_json = json.JSONDecoder(parse_constant=_refuse).decode


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = _from_json(line.decode())
        if _SURROGATE.search(line):
            # Half of a character can be neither written nor sent on; a whole one is two of them in JSON.
            json.dumps(message, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(message, dict):
        kind = type(message).__name__
        raise ValueError(f"a JSON {kind}, not an object: {line[:80]!r}")  # noqa: TRY004 - bad input
    return message


class LineReader:
    """Cuts a stream of bytes into messages.

    Args:
        verify: function that checks a line before it is parsed, and returns it without its authentication.
    """

    def __init__(self, verify: Callable[[bytes], bytes] = lambda line: line) -> None:
        self._verify = verify
        self._partial = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that ``data`` completes; to be exhausted before the next call.

        Raises:
            ValueError: a line is too long or no JSON object. The messages before it have been yielded.
            AuthenticationError: a line is not authentic.
        """
        self._partial += data
        while (end := self._partial.find(b"\n")) >= 0:
            line = bytes(self._partial[:end])
            del self._partial[: end + 1]
            if end >= MAX_LINE:
                break
            yield _parse(self._verify(line))
        if end >= MAX_LINE or len(self._partial) >= MAX_LINE:
            raise ValueError(f"a line exceeds the limit of {MAX_LINE} bytes")

    def take_rest(self) -> bytes:
        """Return the bytes that no message has consumed yet, without keeping them."""
        rest = bytes(self._partial)
        self._partial.clear()
        return rest


class MessageStream:
    """One end of an authenticated connection. Its methods are for one thread, but :meth:`interrupt`.

    Args:
        sock: connected socket, owned by this object from now on.
        session: authentication of the messages.
        timeout: seconds that each wait for the peer may take.
        received: bytes that the peer has sent.
        unsent: bytes to send before the first message.
    """

    def __init__(
        self, sock: socket.socket, session: Session, timeout: float, received: bytes = b"", unsent: bytes = b""
    ) -> None:
        sock.settimeout(timeout)
        self._sock = sock
        self._session = session
        self._reader = LineReader(session.open)
        self._received = received
        self._unsent = unsent
        # The connection is ended through a descriptor that stays the same when TLS takes over the other one.
        self._end = sock.dup()

    @classmethod
    def connect(cls, address: tuple[str, int], authenticator: Authenticator, to: Peer, timeout: float) -> MessageStream:
        """Connect to a :class:`~azureml_elastic.ipc.MessageServer` and authenticate both ends.

        Args:
            authenticator: this end's part in the handshake.
            timeout: seconds that each wait for the peer may take.

        Raises:
            OSError: the server cannot be reached, or does not hold the key.
        """
        sock = socket.create_connection(address, timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = authenticator.open(to)
            sock.sendall(handshake.opening)
            while handshake.session is None:
                sock.sendall(handshake.feed(_receive(sock)))
                _check(handshake)
            return cls(sock, handshake.session, timeout, handshake.take_rest())
        except BaseException:
            sock.close()
            raise

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended, or the peer takes nothing.
        """
        unsent, self._unsent = self._unsent, b""
        self._sock.sendall(unsent + self._session.seal(encode(message)))

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            OSError: the connection has ended, the peer sends nothing, or the message is not its next one.
            ValueError: what has arrived is no message.
        """
        data, self._received = self._received, b""
        while (message := next(self._reader.feed(data), None)) is None:
            data = _receive(self._sock)
        # What follows may be bytes that are no messages, for receive_bytes().
        self._received = self._reader.take_rest()
        return message

    def secure(self, *, is_server: bool) -> None:
        """Encrypt all that follows; both ends prove in TLS that they are those of this connection's handshake.

        Args:
            is_server: whether this end waits for the other one; one of the two must.

        Raises:
            OSError: the TLS handshake failed.
            MissingExtra: cryptography is not installed.
        """
        try:
            from azureml_elastic.ipc.tls import secure
        except ImportError as error:
            raise MissingExtra("cryptography", "node") from error
        if self._received:
            # They would be taken for authentic ones that came through TLS.
            raise AuthenticationError("the peer sent bytes before the TLS handshake")
        self._sock = secure(self._sock, self._session.secret, is_server=is_server)

    def send_bytes(self, content: memoryview) -> None:
        """Send bytes, which the receiver must expect; they are not authenticated unless the stream is secure.

        Raises:
            OSError: the connection has ended, or the peer takes nothing.
        """
        self._sock.sendall(content)

    def receive_bytes(self, target: memoryview) -> None:
        """Fill the target with the bytes that the peer sends next.

        Raises:
            OSError: the connection has ended, or the peer sends nothing.
        """
        done = min(len(self._received), len(target))
        target[:done] = self._received[:done]
        self._received = self._received[done:]
        while done < len(target):
            count = self._sock.recv_into(target[done:])
            if not count:
                raise ConnectionError("the peer closed the connection")
            done += count

    def interrupt(self) -> None:
        """End the connection, so that the thread that uses it fails. For any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()
        self._end.close()


def _check(handshake: Handshake) -> None:
    if handshake.refusal is not None:
        raise AuthenticationError(handshake.refusal)


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(_CHUNK)
    if not data:
        raise ConnectionError("the peer closed the connection")
    return data


CLOSED_BY_PEER = "the peer closed the connection"
"""Reason of an ordinary end."""


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

    def __init__(self, sock: socket.socket, loop: Loop, handshake: Handshake | None = None) -> None:
        sock.setblocking(False)
        # Messages are short: Nagle's algorithm would hold one back until the one before is acknowledged, up to 40 ms
        # later.
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
        # On the caller's thread, which saves the switch to the other one, unless it would overtake what waits there.
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
        # A callback may have closed the connection, or passed it on: what follows is not for it.
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
            # Still under the lock: what another thread sends now comes after what has waited.
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
            # The thread closes its own descriptor when it removes this connection; the stream goes on with another one.
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
