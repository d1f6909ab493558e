"""The two ends: a server of many connections, and a client with one."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from azureml_elastic.ipc.authentication import ANY, Authenticator, Peer
from azureml_elastic.ipc.connection import Connection, encode
from azureml_elastic.ipc.event_loop import Loop, OnClose, OnMessage, OnTick

Address = str | tuple[str, int]
"""The path of a Unix socket, or the host (a name, IPv4 or IPv6) and port of a TCP one."""


def listen(address: Address, *, backlog: int = 128) -> socket.socket:
    """Return a listening socket; port 0 takes a free one, and the file of an earlier Unix socket is replaced.

    Raises:
        OSError: the address is taken, not ours, or a path that is too long for a Unix socket.
    """
    if isinstance(address, str):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(address).unlink(missing_ok=True)
    else:
        family = socket.getaddrinfo(address[0], address[1], type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a process that has ended would keep its port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"Cannot listen on {address!r}: {error}") from error
    return listener


class MessageServer:
    """Serves the connections of a listening socket.

    Args:
        listener: see :func:`listen`; from here on it belongs to the server.
        on_close: callback, exactly once for each connection; ``connection.reason`` says what.
        on_tick: callback about every ``tick`` seconds.
        authenticator: this end's part in handshakes; ``None`` accepts all clients. Clients that are not authenticated
            cause no callbacks.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_message: OnMessage,
        on_close: OnClose | None = None,
        on_tick: OnTick | None = None,
        *,
        tick: float = 1.0,
        authenticator: Authenticator | None = None,
    ) -> None:
        name = listener.getsockname()
        self.address: Address = name if isinstance(name, str) else name[:2]
        self._loop = Loop(
            on_message,
            on_close,
            on_tick,
            tick=tick,
            listener=listener,
            name=f"message-server {self.address}",
            authenticator=authenticator,
        )
        self._loop.start()

    @property
    def connections(self) -> list[Connection]:
        """The open connections whose clients are authenticated, or need not be."""
        return self._loop.connections()

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Send to every open connection."""
        line = encode(message)
        for connection in self.connections:
            connection.send_line(line)

    def close(self) -> None:
        """Stop listening and end all connections; returns when the last callback has returned."""
        self._loop.stop()


class MessageClient:
    """A connection to a :class:`MessageServer`.

    Args:
        on_message: callback for each message that is no reply.
        on_close: called exactly once when the server, a failure or torn input ends the connection, and not
            after :meth:`close`.
        on_tick: callback about every ``tick`` seconds.
        timeout: seconds to connect in.
        authenticator: this end's part in the handshake; ``None`` for a server that does without.
        to: the process that should answer; the connection ends if another one does.

    Raises:
        OSError: nothing listens there, or not within ``timeout``.
    """

    def __init__(
        self,
        address: Address,
        on_message: OnMessage,
        on_close: OnClose | None = None,
        on_tick: OnTick | None = None,
        *,
        tick: float = 1.0,
        timeout: float = 5.0,
        authenticator: Authenticator | None = None,
        to: Peer = ANY,
    ) -> None:
        if isinstance(address, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout)
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                raise OSError(error.errno, f"Cannot connect to {address!r}: {error}") from error
        else:
            sock = socket.create_connection(address, timeout)
        self._message = on_message
        self._closed = on_close
        self._own_close = False
        self._numbers = itertools.count(1)
        self._answered = threading.Condition()
        self._replies: dict[int, dict[str, Any] | None] = {}
        self._loop = Loop(
            self._on_message, self._on_close, on_tick, tick=tick, listener=None, name=f"message-client {address}"
        )
        handshake = authenticator.open(to) if authenticator is not None else None
        self.connection = Connection(sock, self._loop, handshake)
        self._loop.add(self.connection)
        self._loop.start()

    def send(self, message: Mapping[str, Any]) -> bool:
        """See :meth:`Connection.send`."""
        return self.connection.send(message)

    def flush(self, timeout: float) -> bool:
        """See :meth:`Connection.flush`."""
        return self.connection.flush(timeout)

    def request(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send the message with an ``"id"`` and return the reply. Not to be called from a callback.

        Raises:
            ConnectionError: the connection is closed, or ended before the reply.
            TimeoutError: no reply within ``timeout`` seconds; a late one is dropped.
        """
        assert not self._loop.on_thread(), "a request from a callback would wait for itself"
        number = next(self._numbers)
        with self._answered:
            self._replies[number] = None
            try:
                # Under the lock: the reply may be here before the wait for it begins.
                self.connection.send({**message, "id": number})
                self._answered.wait_for(lambda: self._replies[number] or self.connection.closed, timeout)
                reply = self._replies[number]
            finally:
                del self._replies[number]
        if reply is not None:
            return reply
        what = message.get("op", "a message")
        if self.connection.closed:
            raise ConnectionError(f"No reply to {what!r}: {self.connection.reason}.")
        raise TimeoutError(f"No reply to {what!r} within {timeout:g} s.")

    def close(self) -> None:
        """End the connection without ``on_close``; returns when the last callback has returned."""
        self._own_close = True
        self._loop.stop()

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        number = message.get("re")
        if not isinstance(number, int):
            self._message(connection, message)
            return
        with self._answered:
            if number in self._replies:
                self._replies[number] = message
                self._answered.notify_all()

    def _on_close(self, connection: Connection) -> None:
        with self._answered:
            self._answered.notify_all()
        self._loop.stop()
        if self._closed is not None and not self._own_close:
            self._closed(connection)
