"""Random requests to the HTTP servers of this package that stand in for Azure."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REQUESTS = int(os.environ.get("ATTACK_MESSAGES", "300"))
"""Number of random requests to each server; ``python -m nox -s attack`` sends more."""

BATCH = 50

METHODS = ("POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "MERGE", "TRACE", "CONNECT", "BREW", "get", "G\0T")
TARGETS = (
    "/", "//", "/../../../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "http://[", "*", "/\0",
    "/%ff%fe", "/" + "a" * 70_000, "/a?" + "b=c&" * 2000, "?", "127.0.0.1:0", "a..b:1", "[::1]:x", "host:99999", "/ü",
    "/a b",
)  # fmt: skip
VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1.1", "ICY", "", "HTTP/1.x")
LENGTHS = ("-1", "-", "99999999999999", "9" * 5000, "1e3", "0x10", " 7 ", "5, 5", "\u0665", "", "+5", "1_0")
HEADERS = (
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity", "no colon",
    ": no name", "Expect: 100-continue", "Connection: close", "Connection: upgrade", "Upgrade: h2c",
    "Authorization: Basic Og==", "Authorization:", "Authorization: Bearer x", "Metadata: true", "Host: elsewhere",
    "X: " + "y" * 70_000, "\r\n".join(f"X-{number}: y" for number in range(200)), "X-\xff: \xff", " folded",
)  # fmt: skip
BODIES = (
    b"", b"{", b"[]", b"5\r\nabcde\r\n0\r\n\r\n", b"5\r\nab", b"-5\r\nab\r\n", b"ffffffffffffffff\r\n", b"zz\r\n",
    b"\0" * 1000, b"[" * 100_000, b'{"a":' * 20_000, b'"\\ud800"', b"\xff\xfe", b"GET / HTTP/1.1\r\n\r\n", b"1e999",
    b"NaN",
)  # fmt: skip
WORDS = (
    "", "x", "ü", "\0", "\ud800", "x" * 5000, "..", "../../../etc/passwd", "/etc/passwd", "a/b", "azureml://",
    "${{inputs.x}}",
)  # fmt: skip
NUMBERS = (0, 1, -1, 10**9, 2**70, -(10**12), 1e300, float("inf"), float("nan"), 0.5)


def random_json(choose: random.Random, depth: int = 2) -> object:
    """Return a JSON value of any type."""
    kind = choose.randrange(6 if depth else 4)
    if kind == 5:
        return {choose.choice(WORDS): random_json(choose, depth - 1) for _ in range(choose.randrange(4))}
    if kind == 4:
        return [random_json(choose, depth - 1) for _ in range(choose.randrange(4))]
    return (None, choose.random() < 0.5, choose.choice(NUMBERS), choose.choice(WORDS))[kind]


def random_request(choose: random.Random, targets: Sequence[str], documents: Sequence[object] = ()) -> bytes:
    """Return the bytes of a request, each part of which may be malformed.

    Args:
        choose: random source.
        targets: targets that the server knows.
        documents: bodies that the server knows.
    """

    def often(usual: str, others: Sequence[str], share: float = 0.25) -> str:
        return choose.choice(others) if choose.random() < share else usual

    document = choose.choice(documents) if documents and choose.random() < 0.5 else random_json(choose)
    body = choose.choice(BODIES) if choose.random() < 0.5 else json.dumps(document).encode()
    line = f"{often('GET', METHODS, 0.7)} {often(choose.choice(targets), TARGETS)} {often('HTTP/1.1', VERSIONS)}"
    headers = [choose.choice(HEADERS) for _ in range(choose.randrange(4))]
    if choose.random() < 0.8:
        headers.append(f"Content-Length: {often(str(len(body)), LENGTHS)}")
    ends = "\n" if choose.random() < 0.1 else "\r\n"
    data = ends.join([line, *headers, "", ""]).encode("utf-8", "replace") + body
    if choose.random() < 0.1:
        data = choose.randbytes(choose.randrange(300)) + data
    return data[: choose.randrange(len(data))] if choose.random() < 0.2 else data


def exchange(address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes over a connection of their own, and return all that the server sends until it ends the connection."""
    received = []
    with socket.create_connection(address, 60) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)
        with contextlib.suppress(OSError):  # the server may have ended the connection
            sock.shutdown(socket.SHUT_WR)
        while chunk := sock.recv(1 << 16):
            received.append(chunk)
    return b"".join(received)


def statuses(received: bytes) -> set[int]:
    """Return the statuses of the responses in what a server has sent."""
    return {int(found) for found in re.findall(rb"(?:^|\n)HTTP/1\.[01] (\d{3}) ", received)}


def attack(send: Callable[[random.Random], None], requests: int = REQUESTS) -> None:
    """Call a function with random sources, once per batch; hypothesis prints what reproduces a failure."""
    repeat = settings(max_examples=max(1, requests // BATCH), deadline=None, suppress_health_check=list(HealthCheck))
    repeat(given(choose=st.integers(0, 2**64).map(random.Random))(send))()
