"""Accepts the connections of a listening socket, which rests for a moment when the process has no free descriptor."""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import time

__all__ = ["Acceptor"]

_LOG = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.1
_LOG_SECONDS = 10.0
_HINTS = {
    errno.EMFILE: "this process may open {limit} files (ulimit -n)",
    errno.ENFILE: "the machine may open no more files (sysctl fs.file-max)",
}


class Acceptor:
    """The listening socket of a server's thread.

    A connection that cannot be accepted keeps the listening socket readable. After a failure the socket is therefore
    not watched until the pause is over or a connection of the server has ended; the thread serves its connections
    meanwhile.

    Args:
        listener: listening socket, owned by this object from now on.
        selector: selector of the thread.
        server: name of the server, for messages.
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, server: str) -> None:
        listener.setblocking(False)
        self.listener = listener
        self._selector = selector
        self._server = server
        self._resumes: float | None = None
        self._failures = 0
        self._next_log = 0.0
        selector.register(listener, selectors.EVENT_READ)

    def accept(self) -> socket.socket | None:
        """Return the next connection, ``None`` if there is none or it cannot be accepted now."""
        try:
            return self.listener.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionError):  # a client that has gone meanwhile
            return None
        except OSError as error:
            self._pause(error)
            return None

    def deadline(self) -> float | None:
        """Return when the pause is over, ``None`` without one."""
        return self._resumes

    def resume(self, *, freed: bool = False) -> None:
        """Watch the listening socket again if the pause is over, or at once if a descriptor has been freed."""
        if self._resumes is not None and (freed or time.monotonic() >= self._resumes):
            self._resumes = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()

    def _pause(self, error: OSError) -> None:
        now = time.monotonic()
        self._resumes = now + _PAUSE_SECONDS
        self._selector.unregister(self.listener)
        self._failures += 1
        if now >= self._next_log:
            hint = _HINTS.get(error.errno or 0, "see the operating system's limits")
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            tries = f", {self._failures} times since the last such line" if self._failures > 1 else ""
            _LOG.warning(
                "%s could not accept a connection%s: %s; %s. Its connections are served, and new ones are accepted as "
                "soon as files are closed.",
                self._server,
                tries,
                error,
                hint.format(limit=limit),
            )
            self._failures, self._next_log = 0, now + _LOG_SECONDS
