"""An HTTP proxy that injects faults between the nodes and their table.

Nodes get the proxy's address instead of the table's. Faults are switched on and off at run time::

    with TableProxy(azurite.endpoint, seed=7) as proxy:
        ...                                          # nodes that use proxy.endpoint
        outage = proxy.add(Disturbance("outage"))    # connections are refused
        time.sleep(30)
        proxy.remove(outage)

The affected calls are drawn from the seed, the HTTP method and the call's number among the calls of that method, so
the same sequence of calls meets the same faults. Every call is recorded as an :class:`Exchange`.

Only plain HTTP, as the emulator's. A call's signature covers the path but not the host, so it stays valid.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from typing_extensions import Self

from azureml_elastic.errors import UsageError
from azureml_elastic.local.faults.http_call import (
    Answer,
    Exchange,
    Request,
    busy,
    forward,
    lie,
    page,
    read_request,
    refused,
)
from azureml_elastic.local.faults.model import LIES, Disturbance, Fate, draw
from azureml_elastic.local.http_server import RequestRefused

__all__ = ["Disturbance", "Exchange", "TableProxy"]

_HOLD_S = 60.0
"""Longest time in seconds for which a call without a response is held."""

_JOIN_S = 5.0
_ACCEPT_PAUSE_S = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what was not sent and resets the connection


@dataclass(eq=False)
class _Client:
    """Connection of a node."""

    sock: socket.socket
    condemned: bool = False
    thread: threading.Thread | None = None

    def condemn(self) -> None:
        """Make the connection's thread reset it; may be called from any thread."""
        self.condemned = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)  # wakes the thread, without an effect on the node yet


class TableProxy:
    """A thread-safe context manager that forwards calls to a table, with faults, on a free port of this machine.

    Args:
        target: URL of the table, plain HTTP.
        seed: random seed for the affected calls.
        log: file to which each call is appended as a line of JSON; ``None`` for none.

    Raises:
        UsageError: the URL is not plain HTTP.
    """

    def __init__(self, target: str, *, seed: int = 0, log: Path | None = None) -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or parts.hostname is None:
            raise UsageError(
                f"Table faults require a table with plain HTTP, such as the emulator Azurite, and {target!r} is not. "
                "Use the table 'azurite'."
            )
        self._table, self._path = (parts.hostname, parts.port or 80), parts.path
        self._seed = seed
        self._log_path = log
        self._log: BinaryIO | None = None
        self._lock = threading.Lock()
        self._disturbances: list[Disturbance] = []
        self._hits: Counter[int] = Counter()
        self._seen: Counter[str] = Counter()
        self._exchanges: list[Exchange] = []
        self._clients: set[_Client] = set()
        self._closing = threading.Event()
        self._placeholder: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """URL of the table through the proxy."""
        return f"http://127.0.0.1:{self._port}{self._path}"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All calls so far, in the order of their end."""
        with self._lock:
            return tuple(self._exchanges)

    def set(self, *disturbances: Disturbance) -> None:
        """Replace all faults; the first one that affects a call applies."""
        with self._lock:
            self._disturbances = list(disturbances)
            self._hits.clear()
        self._open_or_refuse()

    def add(self, disturbance: Disturbance) -> Disturbance:
        """Add a fault and return it for :meth:`remove`."""
        with self._lock:
            self._disturbances.append(disturbance)
        self._open_or_refuse()
        return disturbance

    def remove(self, disturbance: Disturbance) -> None:
        """Remove a fault if it is there."""
        with self._lock, contextlib.suppress(ValueError):
            self._disturbances.remove(disturbance)
        self._open_or_refuse()

    def hits(self, disturbance: Disturbance) -> int:
        """Return the number of calls that a disturbance has affected so far."""
        with self._lock:
            return self._hits[id(disturbance)]

    def clear(self) -> None:
        """Remove all faults."""
        self.set()

    def __enter__(self) -> Self:
        # Bound without listening, it reserves the port while connections are refused.
        self._placeholder = _bound(0)
        self._port = self._placeholder.getsockname()[1]
        if self._log_path is not None:
            self._log = self._log_path.open("ab", buffering=0)
        self._open_or_refuse()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._refuse()
        with self._lock:
            threads = [client.thread for client in self._clients if client.thread is not None]
        for thread in threads:
            thread.join(_JOIN_S)
        if self._placeholder is not None:
            self._placeholder.close()
        with self._lock:
            if self._log is not None:
                self._log.close()
            self._log = None

    # --- connections -------------------------------------------------------------------------------------------------

    def _open_or_refuse(self) -> None:
        with self._lock:
            refused = any(disturbance.kind == "outage" for disturbance in self._disturbances)
        if refused:
            self._refuse()
            return
        with self._lock:
            if self._listener is not None or self._placeholder is None or self._closing.is_set():
                return
            self._listener = _bound(self._port)
            self._listener.listen(1024)
            threading.Thread(target=self._accept, args=(self._listener,), name="table-proxy", daemon=True).start()

    def _refuse(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            clients = list(self._clients)
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        for client in clients:
            client.condemn()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    with self._lock:
                        if self._listener is not listener:
                            return  # shut down
                    self._closing.wait(_ACCEPT_PAUSE_S)  # this process has no free descriptor
                    continue
                client = _Client(sock)
                client.thread = threading.Thread(target=self._serve, args=(client,), name="table-call", daemon=True)
                with self._lock:
                    client.condemned = self._listener is not listener  # an outage has begun meanwhile
                    self._clients.add(client)
                client.thread.start()

    def _serve(self, client: _Client) -> None:
        reader = client.sock.makefile("rb")
        try:
            while not client.condemned and (request := read_request(reader)) is not None:
                if not self._handle(client, request):
                    client.condemned = True
        except RequestRefused as error:
            with contextlib.suppress(OSError):
                client.sock.sendall(refused(error).to_bytes())
        except (OSError, HTTPException, ValueError):
            client.condemned = True  # the table or the client is gone
        finally:
            if client.condemned:
                with contextlib.suppress(OSError):
                    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            reader.close()
            client.sock.close()
            with self._lock:
                self._clients.discard(client)

    # --- a call ------------------------------------------------------------------------------------------------------

    def _handle(self, client: _Client, request: Request) -> bool:
        """Handle one call, with its fault if there is one; return whether the connection stays open."""
        number, fate = self._draw(request)
        trouble = None if fate is None else fate.kind
        if fate is not None and trouble == "slow" and not fate.arrives:
            self._closing.wait(fate.delay_s)
        answer: Answer | None = None
        false = lie(fate.kind, request.method, number) if fate is not None and fate.kind in LIES else None
        if fate is not None and fate.kind in LIES and false is None:
            fate = trouble = None  # the truth is part of the lie
        arrives = fate is None or fate.arrives or trouble == "slow"
        answered = False
        try:
            if arrives:
                answer = forward(request, self._table)
            answered = self._answer(client, fate, answer or false)
            return answered or (trouble in ("throttle", "garbage", *LIES) and not client.condemned)
        finally:
            if client.condemned and not answered:
                trouble = trouble or "outage"
            self._record(
                Exchange(
                    number=number,
                    time=time.time(),
                    method=request.method,
                    path=request.target.partition("?")[0],
                    row=request.row,
                    trouble=trouble,
                    arrived=arrives,
                    status=None if answer is None else answer.status,
                    answered=answered,
                )
            )

    def _answer(self, client: _Client, fate: Fate | None, answer: Answer | None) -> bool:
        """Send the client its response; return whether it is the table's complete one."""
        if fate is not None and fate.kind == "slow" and fate.arrives and not client.condemned:
            self._closing.wait(fate.delay_s)
        if client.condemned:
            return False
        if fate is None or fate.kind == "slow":
            assert answer is not None, "a call without a fault, or a slow one, reaches the table"
            client.sock.sendall(answer.to_bytes())
            return True
        if fate.kind == "timeout":
            self._hold(client)
        elif fate.kind == "half" and answer is not None:
            data = answer.to_bytes()
            client.sock.sendall(data[: len(data) - (len(answer.body) or len(data)) // 2])
        elif fate.kind == "throttle":
            client.sock.sendall(busy(fate.retry_after_s).to_bytes())
        elif fate.kind == "garbage":
            client.sock.sendall(page(fate.status).to_bytes())
        elif fate.kind in LIES and answer is not None:
            client.sock.sendall(answer.to_bytes())
        return False

    def _hold(self, client: _Client) -> None:
        """Return when the client has closed the connection."""
        until = time.monotonic() + _HOLD_S
        while time.monotonic() < until and not client.condemned and not self._closing.is_set():
            # Who waits for an answer sends nothing: there is something to read once the connection is closed.
            if select.select([client.sock], [], [], 0.1)[0]:
                return
        client.condemned = True

    def _draw(self, request: Request) -> tuple[int, Fate | None]:
        """Return the number of a call, and its fault if there is one."""
        text = f"{request.target}\n{request.body.decode('utf-8', 'replace')}"
        with self._lock:
            self._seen[request.method] += 1
            concerned = [
                disturbance
                for disturbance in self._disturbances
                if disturbance.concerns(request.method, text)
                and (disturbance.times is None or self._hits[id(disturbance)] < disturbance.times)
            ]
            fate = draw(concerned, f"{self._seed}/{request.method}/{self._seen[request.method]}")
            if fate is not None:
                # By identity: two equal faults have hits of their own.
                self._hits[id(fate.source)] += 1
            return self._seen.total(), fate

    def _record(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)
            if self._log is not None:
                self._log.write(json.dumps(asdict(exchange)).encode() + b"\n")


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    # Two sockets share the port: one reserves it, the other listens while there is no outage.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock
