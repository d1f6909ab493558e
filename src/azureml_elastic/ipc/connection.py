"""One end of a connection: what the peer has not taken yet, bounded, and the lines that have arrived."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from azureml_elastic.ipc.line_codec import LineReader, encode

__all__ = ["Connection", "Waker"]

_MAX_UNSENT = 8 << 20
_CHUNK = 1 << 16


class Waker(Protocol):
    """What a connection needs of the thread that serves it."""

    def wake(self) -> None:
        """Have the thread look at its connections."""


class Connection:
    """One end of a connection. Every method may be called from any thread and returns at once, but ``flush``.

    Args:
        sock: connected; from here on it belongs to this object.
        loop: the thread that serves it.

    Attributes:
        state: for the owner of the callbacks, unread here.
        last_received: ``time.monotonic()`` of the last bytes from the peer, or of the connection's start.
        reason: why the connection ended, ``""`` while it is open.
        peer: the peer's address, for messages.
    """

    def __init__(self, sock: socket.socket, loop: Waker) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.state: dict[str, Any] = {}
        self.last_received = time.monotonic()
        self.reason = ""
        self.peer = "unix" if sock.family == socket.AF_UNIX else "{}:{}".format(*sock.getpeername()[:2])
        self._sock = sock
        self._loop = loop
        self._reader = LineReader()
        self._unsent = bytearray()
        self._changed = threading.Condition()

    @property
    def closed(self) -> bool:
        """Whether no more can be sent; ``on_close`` has been called or is about to be."""
        return bool(self.reason)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send what the socket takes now and leave the rest to the thread.

        Returns:
            False where the connection is closed; the message is dropped, and ``on_close`` tells the owner.
        """
        line = encode(message)
        with self._changed:
            if self.reason:
                return False
            if not self._unsent:
                try:
                    line = line[self._sock.send(line) :]
                except (BlockingIOError, InterruptedError):
                    pass
                except OSError as error:
                    self._end(f"sending failed: {error}")
                    return False
            if line:
                self._unsent += line
                if len(self._unsent) > _MAX_UNSENT:
                    self._end(f"the peer leaves more than {_MAX_UNSENT} bytes unread")
                    return False
                self._loop.wake()
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until the kernel has taken all that was sent, so that it survives the end of this process.

        Returns:
            False where ``timeout`` seconds were not enough or the connection ended before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.reason or not self._unsent, timeout)
            return not self._unsent and not self.reason

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection; what the kernel has not taken yet is dropped."""
        with self._changed:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._changed.notify_all()
            self._loop.wake()

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
            self.close("the peer closed the connection")
            return
        self.last_received = time.monotonic()
        messages = self._reader.feed(data)
        while not self.reason:
            try:
                message = next(messages, None)
            except ValueError as error:
                self.close(f"the peer sent what is no message: {error}")
                return
            if message is None:
                return
            yield message

    def wants_to_write(self) -> bool:
        """Whether bytes wait for the socket. For the thread alone."""
        return bool(self._unsent)

    @property
    def socket(self) -> socket.socket:
        """For the thread alone."""
        return self._sock
