"""Processor time of a connection between agents: the handshake and messages, as they are and with mutual TLS 1.3.

``python benchmarks/handshakes.py`` prints medians, without sockets. The TLS connection is that of shards and of Dask's
processes; a certificate that an authority has issued to each node costs more.
"""

from __future__ import annotations

import contextlib
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from azureml_elastic.ipc import KEY_BYTES, Authenticator, Peer
from azureml_elastic.ipc.authentication import Handshake
from azureml_elastic.ipc.tls import derive_credentials

TIMES = 9
HANDSHAKES = 100
MESSAGES = 2000
KEY = bytes(KEY_BYTES)
LINE = b'{"op":"report","body":{"op":"vote","round":12,"step":34567,"ok":true}}\n'
CLIENT, SERVER = (Authenticator(Peer(name, name), "hub", KEY) for name in ("client", "server"))


class Seconds(NamedTuple):
    """Processor time of each end."""

    client: float
    server: float


def ours() -> tuple[Handshake, Handshake, Seconds]:
    """Complete a handshake of agents."""
    began = time.thread_time()
    client = CLIENT.open(SERVER.me)
    at_client = time.thread_time() - began
    server = SERVER.accept()
    answer = server.feed(client.opening)
    asked = time.thread_time()
    proof = client.feed(answer)
    proved = time.thread_time()
    server.feed(proof)
    at_client += proved - asked
    return client, server, Seconds(at_client, time.thread_time() - began - at_client)


class TlsEnd:
    """One end of a TLS connection."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=is_server)

    def advance(self, data: bytes) -> bytes:
        """Take what the other end has sent, and return what to send to it."""
        self.incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.outgoing.read()


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a client and of a server that accept each other alone."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key.pem")
        path.write_bytes(derive_credentials(KEY, "benchmark"))
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(path)
            context.load_cert_chain(path)
            made.append(context)
    made[1].num_tickets = 0
    return made[0], made[1]


def tls(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> tuple[TlsEnd, TlsEnd, Seconds]:
    """Complete a handshake of TLS."""
    began = time.thread_time()
    client = TlsEnd(client_context, is_server=False)
    hello = client.advance(b"")
    at_client = time.thread_time() - began
    server = TlsEnd(server_context, is_server=True)
    answer = server.advance(hello)
    asked = time.thread_time()
    proof = client.advance(answer)
    proved = time.thread_time()
    server.advance(proof)
    at_client += proved - asked
    return client, server, Seconds(at_client, time.thread_time() - began - at_client)


def message_seconds(exchange: Callable[[], object]) -> float:
    """Return the median time in which one end sends a message and the other one reads it."""
    taken = []
    for _ in range(TIMES):
        began = time.thread_time()
        for _ in range(MESSAGES):
            exchange()
        taken.append((time.thread_time() - began) / MESSAGES)
    return statistics.median(taken)


def main() -> None:
    """Measure and print."""
    client_context, server_context = contexts()
    handshakes: dict[str, list[Seconds]] = {"agents": [], "TLS 1.3": []}
    for _ in range(TIMES * HANDSHAKES):
        client, server, seconds = ours()
        handshakes["agents"].append(seconds)
        tls_client, tls_server, seconds = tls(client_context, server_context)
        handshakes["TLS 1.3"].append(seconds)
    sending, receiving = client.session, server.session
    assert sending is not None
    assert receiving is not None

    def encrypted() -> bytes:
        tls_client.tls.write(LINE)
        tls_server.incoming.write(tls_client.outgoing.read())
        return tls_server.tls.read()

    messages = {
        "agents": message_seconds(lambda: receiving.open(sending.seal(LINE)[:-1])),
        "TLS 1.3": message_seconds(encrypted),
    }
    print(ssl.OPENSSL_VERSION)
    for name, all_seconds in handshakes.items():
        ends = (
            f"{end} {statistics.median(getattr(each, end) for each in all_seconds) * 1e6:.0f}"
            for end in Seconds._fields
        )
        print(f"{name}: handshake, microseconds of the {', of the '.join(ends)}; a message {messages[name] * 1e6:.1f}")


if __name__ == "__main__":
    main()
