"""The process groups of a round: opened, replaced by those of the next round, and aborted from any thread.

A collective whose peer has died fails within milliseconds, because its connection breaks. One whose peer is frozen or
unreachable waits for torch's timeout of 30 minutes: gloo has no abort. :meth:`ProcessGroups.abort` shuts down gloo's
connections and those to the store, and every collective fails at once.

gloo's connections are recognised by the epoll instance that watches them (``/proc/self/fdinfo``): each gloo device has
one, with a listening socket, a pipe, and a pointer to a handler where Python's selectors keep the descriptor
(``gloo/transport/tcp/loop.cc`` and ``listener.cc``). Sockets of other threads are in other instances, or in none.

**The agreement of a replica's ranks** comes before each update of a sharded model. A rank that has all gradients of a
step can complete it alone. Without an agreement, when another replica is lost, some ranks of this one may have their
gradients while the exchange of others' has failed: neither the step before nor this one would then be whole in what is
left. So the ranks of a replica wait for each other first, and either all of them complete the step or none does. The
wait is for peers of the same replica, mostly on the same node. The connections of this group are therefore left alone
when the round ends (:meth:`ProcessGroups.abort`): the agreement is completed where it can be, and a peer that cannot
take part closes them by its exit.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.distributed.data_parallel import ElasticDataParallel
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process import close_group, open_group, without_collection
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ipc.agent_interface import WorkerIdentity

_PEER_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "tcpstore", "broken pipe", "socket timeout")
_FDINFO = Path("/proc/self/fdinfo")
_WATCHED = re.compile(r"^tfd: *(\d+) .* data: *([0-9a-f]+)", re.MULTILINE)

Address = tuple[str, int]


class ProcessGroups:
    """The default process group of a round, and two control groups beside it.

    Attributes:
        control: control group of the training thread.
        background: control group of the thread that writes checkpoints.
        owns_group: whether :meth:`open` has joined the default group, and not the script.
    """

    control: ControlGroup
    background: ControlGroup

    def __init__(self, identity: WorkerIdentity, device: torch.device) -> None:
        self.identity = identity
        self.device = device
        self.owns_group = False
        self._aborting = threading.Lock()
        self._controls: tuple[ControlGroup, ...] = ()
        self._store: frozenset[Address] = frozenset()
        self._spared: frozenset[int] = frozenset()

    def open(self) -> None:
        """Join the process groups of the round.

        Raises:
            RuntimeError: a peer was lost meanwhile.
        """
        self._store = _store_addresses()  # before: an abort from another thread needs it while the group is opened
        self.owns_group = open_group(self.identity, self.device)
        self._controls = self.control, self.background = (ControlGroup(), ControlGroup())
        if not self.owns_group:
            options = getattr(dist.distributed_c10d._get_default_group()._get_backend(self.device), "options", None)  # noqa: SLF001
            self.wait_at_most(getattr(options, "_timeout", default_pg_timeout))

    def wait_at_most(self, timeout: timedelta) -> None:
        """Set how long collectives of the default group wait; those of the control groups wait no shorter than before.

        A rank that prepares the data while the others wait for it may keep them waiting in either.
        """
        set_timeout = dist.distributed_c10d._set_pg_timeout  # noqa: SLF001 - there is no other way for an open group
        set_timeout(timeout, dist.group.WORLD)
        if timeout > default_pg_timeout:
            for control in self._controls:
                set_timeout(timeout, control.group)

    def close(self, models: Iterable[ElasticDataParallel] = ()) -> None:
        """Leave the groups, which the models release, also after an error or an abort."""
        with self._aborting:  # an abort that goes on would shut down what gets the numbers of closed descriptors
            self._spared = frozenset()
        # A group that is garbage after an error would be waited for with the GIL, which its threads may need to end.
        with without_collection():
            with contextlib.suppress(RuntimeError):
                close_group()
            releases = [*(control.close for control in self._controls), *(model.dissolve for model in models)]
            self._controls = ()
            # gloo waits 10 to 20 ms for the threads of each group that goes: for all of them at once.
            threads = [threading.Thread(target=release, name="release-group") for release in releases]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    @contextlib.contextmanager
    def sparing(self) -> Iterator[None]:
        """Leave the groups that are made in this block alone when the others are aborted."""
        # By difference, as gloo tells nobody its descriptors: no other group may be made meanwhile.
        before = frozenset(_event_loops())
        yield
        self._spared |= frozenset(_event_loops()) - before

    def abort(self) -> None:
        """Make the present and all later collectives of this process fail, but those of groups that are spared.

        Callable from any thread.
        """
        with self._aborting:
            # Shut down, not closed: gloo's threads own the descriptors, and a number that is free may be another's.
            gloo = set(_gloo_descriptors())
            spared = set(_gloo_descriptors(of=self._spared)) if self._spared else set()
            for descriptor in _descriptors():
                if descriptor in spared:
                    continue
                _shut_down(descriptor, self._store, any_peer=descriptor in gloo)
            device_of(self.device).abort()  # last: it waits for the kernels that it ends


def abort_gloo() -> None:
    """Make all operations of this process that use gloo fail, also those of another library's copy of gloo.

    Callable from any thread.
    """
    for descriptor in set(_gloo_descriptors(listening=False)):
        _shut_down(descriptor, frozenset(), any_peer=True)


def is_peer_error(error: BaseException) -> bool:
    """Return whether an error means that another rank, or the connection to it, is lost."""
    lost = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _PEER_WORDS)
    return lost or isinstance(error, dist.DistError)


def _store_addresses() -> frozenset[Address]:
    """Return the addresses under which torch connects to the store."""
    master = WorkerEnvironment.read().master  # of this round, or the script's own
    with contextlib.suppress(OSError):
        if master is not None:
            return frozenset((str(found[4][0]), master[1]) for found in socket.getaddrinfo(*master))
    return frozenset()


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_FDINFO)]  # noqa: PTH208 - thousands of them, and only numbers
    except OSError:
        return []


def _event_loops() -> Iterator[int]:
    """Yield the descriptors of the epoll instances of this process."""
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":  # noqa: PTH115
                yield descriptor


def _gloo_descriptors(*, of: frozenset[int] | None = None, listening: bool = True) -> Iterator[int]:
    """Yield the descriptors that gloo's event loops watch.

    Args:
        of: epoll instances, ``None`` for all.
        listening: whether loops without a listening socket are left out: older versions of gloo, such as Horovod's,
            close it when all ranks have connected.
    """
    for descriptor in _event_loops():
        if of is not None and descriptor not in of:
            continue
        with contextlib.suppress(OSError):
            text = (_FDINFO / str(descriptor)).read_text()
            watched = {int(each): int(data, 16) for each, data in _WATCHED.findall(text)}
            # epoll_data is a union: where the descriptor was stored, its lower half is that number.
            pointers = all(each != data & 0xFFFFFFFF for each, data in watched.items())
            pipe = any(stat.S_ISFIFO(os.fstat(each).st_mode) for each in watched)
            if pointers and pipe and (not listening or any(_listens(each) for each in watched)):
                yield from watched


def _listens(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down(descriptor: int, peers: frozenset[Address], *, any_peer: bool) -> None:
    """Shut a TCP connection down if it has one of these peers; the descriptor stays open for its owner.

    Listeners are left alone: gloo does not survive the shutdown of its own.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or _listens(descriptor):
                return
            host, port = connection.getpeername()[:2] if not any_peer else ("", 0)
            if any_peer or (host.removeprefix("::ffff:"), port) in peers:
                connection.shutdown(socket.SHUT_RDWR)


class ReplicaGroup:
    """The ranks of this process's replica; to make it, all ranks give the ranks of every replica."""

    def __init__(self, groups: ProcessGroups, replicas: Sequence[Sequence[int]]) -> None:
        self._group: dist.ProcessGroup | None = None
        with groups.sparing():
            for ranks in replicas:  # in one order on all ranks: each of them takes part in making each group
                made = dist.new_group([*ranks], backend="gloo")
                if groups.identity.rank in ranks:
                    self._group = made

    def agree(self) -> None:
        """Wait until all ranks of the replica have their gradients. A collective of them.

        Raises:
            RuntimeError: one of them was lost, or cannot complete the step.
        """
        dist.all_reduce(torch.zeros(1), group=self._group)
