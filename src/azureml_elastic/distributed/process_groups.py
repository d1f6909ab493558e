"""The ranks that this process trains with: its identity, the process group, and how a broken group is let go.

A collective whose peer has died fails within milliseconds, because its connection breaks. One whose peer is frozen or
cut off would wait for torch's timeout of 30 minutes: gloo has no abort. :meth:`ProcessGroups.abort` shuts down the connections
that the group has opened, from any thread, and every collective on them fails at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.distributed.process import close_group, open_group
from azureml_elastic.ipc.agent_interface import Identity

__all__ = ["ProcessGroups", "is_peer_error"]

_LOG = logging.getLogger(__name__)

_PEER_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "tcpstore", "broken pipe", "socket timeout")


class ProcessGroups:
    """The process group of the round.

    Args:
        identity: of this process.
        device: on which it trains.
    """

    def __init__(self, identity: Identity, device: torch.device) -> None:
        self.identity = identity
        self.device = device
        self._lock = threading.Lock()
        self._before: frozenset[str] = frozenset()
        self._opening = False
        self._sockets: frozenset[str] = frozenset()
        self._controls: tuple[ControlGroup, ...] = ()
        self.control: ControlGroup
        """The ranks' agreement, for the training thread."""
        self.background: ControlGroup
        """The same for the thread that writes checkpoints."""
        self.owns_group = False
        """Whether the group was opened here, and so is to be closed here."""

    def open(self) -> None:
        """Join the process group.

        Raises:
            RuntimeError: a peer was lost meanwhile.
        """
        with self._lock:
            self._before, self._opening = _connections(), True
        try:
            self.owns_group = open_group(self.identity, self.device)
            self._controls = (ControlGroup(), ControlGroup())
            self.control, self.background = self._controls
        finally:
            with self._lock:
                self._sockets, self._opening = _connections() - self._before, False

    def reopen(self, identity: Identity) -> None:
        """Leave the group, if there still is one, and join that of another round.

        Raises:
            RuntimeError: a peer was lost meanwhile.
        """
        self.close()
        self.identity = identity
        self.open()

    def close(self) -> None:
        """Leave the group, whatever state it is in."""
        with contextlib.suppress(RuntimeError):
            close_group()
        for control in self._controls:
            control.close()
        self._controls = ()

    def abort(self) -> None:
        """Make every collective of this process fail, those under way and later ones. From any thread."""
        with self._lock:
            own = _connections() - self._before if self._opening else self._sockets
        if dist.is_initialized() and self.device.type == "cuda":
            with contextlib.suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group()  # noqa: SLF001
        for descriptor, inode in _descriptors():
            if inode in own:
                _shut_down(descriptor)


def is_peer_error(error: BaseException) -> bool:
    """Tell whether an error says that another rank, or the way to it, is gone."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield this process's sockets: the descriptor and the kernel's name for what is behind it."""
    try:
        names = os.listdir("/proc/self/fd")  # noqa: PTH208 - thousands of them, and only numbers
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                yield int(name), target


def _connections() -> frozenset[str]:
    return frozenset(inode for _, inode in _descriptors())


def _shut_down(descriptor: int) -> None:
    """Shut a connection down, but leave its descriptor to its owner; gloo would not survive that of a listener."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
            connection.shutdown(socket.SHUT_RDWR)
