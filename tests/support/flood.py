"""A process that floods a server with idle connections; it has its own file descriptors and processor time."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator


class Flood:
    """A flood in progress.

    Args:
        process: the process that holds the connections.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def opened(self) -> int:
        """Return how many connections have been opened so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def flood(port: int, connections: int, *, addresses: int = 1, reopens: bool = False) -> Iterator[Flood]:
    """Open connections that say nothing; once all have been opened, yields.

    Args:
        port: port of the server on 127.0.0.1.
        connections: number of connections that are held, as far as the server lets them be.
        addresses: number of addresses from which they come: 127.0.0.1 alone, or as many others.
        reopens: whether each connection that the server closes is opened again at once.
    """
    arguments = [str(port), str(connections), str(addresses), str(int(reopens))]
    command = [sys.executable, "-S", "-E", __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) >= connections
            yield Flood(process)
            assert process.poll() is None
        finally:
            process.kill()


def _main(port: int, connections: int, addresses: int, reopens: int) -> None:
    needed, hard = connections + 64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    opened = held = 0
    announced = False
    while True:
        for _ in range(min(50, connections - (held if reopens else opened))):
            source = "127.0.0.1" if addresses == 1 else f"127.0.0.{2 + opened % addresses}"
            sock = socket.create_connection(("127.0.0.1", port), 30, (source, 0))
            selector.register(sock, selectors.EVENT_READ)
            opened, held = opened + 1, held + 1
        if opened >= connections and not announced:
            announced = True
            print(opened, flush=True)
        full = (held if reopens else opened) >= connections
        for key, _ in selector.select(None if full else 0):
            if key.fileobj is sys.stdin:
                sys.stdin.readline()
                print(opened, flush=True)
            else:  # closed by the server
                selector.unregister(key.fileobj)
                key.fileobj.close()
                held -= 1


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
