"""A connection that one thread uses by itself: it sends and receives messages and bytes, and waits for them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from azureml_elastic.errors import MissingExtra
from azureml_elastic.ipc.authentication import AuthenticationError, Authenticator, Handshake, Peer, Session
from azureml_elastic.ipc.line_codec import LineReader, encode

__all__ = ["MessageStream"]

_CHUNK = 1 << 16


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
            address: host and port.
            authenticator: this end's part in the handshake.
            to: the process that should answer.
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
