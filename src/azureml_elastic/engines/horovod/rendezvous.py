"""What the workers of one node wait for, and tell the workers of other nodes, while they connect.

All workers of a round connect together, in a *generation*: the first one of the round, or another one after an error
without the loss of a node. A worker waits for its generation where it asks for its place again, or, if it is new, where
it stores its address for the first time. What workers store is in the store of the round, by generation.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum

from azureml_elastic.engines.engine import RoundStore

_POLL_SECONDS = 0.01
_ALL = "global"
_LAST_SCOPE = "cross_"
"""Workers connect within this scope after all others: Horovod's gloo connects all, then those of a node, then these."""


@dataclass(frozen=True)
class Slot:
    """Place of one worker, as Horovod names it; *cross* is among those of all nodes that have the same local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which a new worker finds its place."""
        return {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(self).items()}

    def response(self) -> bytes:
        """Return what a worker that asks for another place is answered."""
        return ",".join(map(str, astuple(self))).encode()


def slots_of(node: int, counts: Sequence[int]) -> list[Slot]:
    """Return the slots of one node, from the numbers of workers of the nodes in rank order."""
    first = sum(counts[:node])
    return [
        Slot(
            first + local_rank,
            sum(counts),
            local_rank,
            counts[node],
            sum(count > local_rank for count in counts[:node]),
            sum(count > local_rank for count in counts),
        )
        for local_rank in range(counts[node])
    ]


class Status(Enum):
    """How far a worker has come."""

    ABSENT = "absent"
    STARTING = "starting"
    WAITING = "waiting"
    CONNECTING = "connecting"
    RUNNING = "running"


class _Generation:
    def __init__(self, store: RoundStore, number: int, slots: Sequence[Slot]) -> None:
        self.store = store
        self.prefix = f"connect/{number}/"
        self.slots = slots


class LocalRendezvous:
    """Answers the workers of one node. Thread-safe.

    Args:
        notify: function that is given where a worker can be notified: local rank, the address and a key as Horovod
            encodes them, and port of the connection by which they came.
    """

    def __init__(self, count: int, notify: Callable[[int, bytes, int], None]) -> None:
        self._changed = threading.Condition()
        self._status = [Status.ABSENT] * count
        self._starts = [0] * count
        """Number of processes so far, by local rank: requests of earlier ones are not answered."""
        self._slots: list[Slot | None] = [None] * count
        self._generation: _Generation | None = None
        self._losses = 0
        self._aborting: set[int] = set()
        """Workers that have been answered a loss, and have not asked again: they shut their connections down."""
        self._closed = False
        self._notify = notify

    # --- for the engine ----------------------------------------------------------------------------------------------

    def statuses(self) -> list[Status]:
        """Return how far the workers have come, by local rank."""
        with self._changed:
            return list(self._status)

    def started(self, local_rank: int, slot: Slot) -> None:
        """Expect a new process of a worker, which knows its place."""
        with self._changed:
            self._status[local_rank] = Status.STARTING
            self._starts[local_rank] += 1
            self._aborting.discard(local_rank)
            self._slots[local_rank] = slot
            self._changed.notify_all()

    def ended(self, local_rank: int) -> None:
        """Note that the process of a worker is gone."""
        with self._changed:
            self._status[local_rank] = Status.ABSENT
            # Its requests may still block threads of the server, which compare the number when they wake up.
            self._starts[local_rank] += 1
            self._aborting.discard(local_rank)
            self._changed.notify_all()

    def expects(self, local_rank: int, slot: Slot) -> bool:
        """Return whether a process that has not connected yet knows this place."""
        with self._changed:
            return self._slots[local_rank] == slot

    def lose(self) -> None:
        """Have the workers abort what they do with each other: another one is lost."""
        with self._changed:
            self._losses += 1
            self._changed.notify_all()

    @property
    def aborting(self) -> bool:
        """Whether a worker still shuts its connections down, and would shut new ones down as well."""
        with self._changed:
            return bool(self._aborting)

    def begin(self, store: RoundStore, number: int, slots: Sequence[Slot]) -> None:
        """Let all workers connect, in a generation of the round with this number and these places by local rank."""
        with self._changed:
            self._generation = _Generation(store, number, slots)
            self._status = [Status.CONNECTING] * len(self._status)
            self._slots = list(slots)
            self._changed.notify_all()

    def close(self) -> None:
        """Answer nobody any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- for the workers, by the threads of the server ---------------------------------------------------------------

    def place(self, local_rank: int) -> bytes:
        """Return the place of a worker that has left the one before; blocks until there is one.

        Raises:
            RuntimeError: there will be none.
        """
        with self._changed:
            self._status[local_rank] = Status.WAITING
            generation = self._wait(local_rank)
            return generation.slots[local_rank].response()

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store what a worker tells the others while they connect.

        Raises:
            RuntimeError: the round is over.
        """
        with self._changed:
            generation = self._generation
            # A new worker knows its place by its variables, and so asks for none: it is held at its first address.
            new = self._new_worker(key) if scope == _ALL else None
            if new is not None:
                self._status[new] = Status.WAITING
                generation = self._wait(new)
        if generation is None:
            raise RuntimeError("The workers do not connect now.")
        generation.store.set(f"{generation.prefix}{scope}/{key}", value)

    def get(self, scope: str, key: str) -> bytes:
        """Return what another worker has stored; blocks until it has.

        Raises:
            RuntimeError: the round is over.
        """
        with self._changed:
            generation = self._generation
        while generation is not None and not self._closed and generation is self._generation:
            # Without the lock: each look is a request to the store, for which the engine would wait.
            if (value := generation.store.get(f"{generation.prefix}{scope}/{key}")) is not None:
                return value
            time.sleep(_POLL_SECONDS)
        raise RuntimeError("The round is over.")

    def delete(self, scope: str) -> None:
        """Note that a worker has connected to all others of the scope: Horovod deletes its keys then."""
        with self._changed, contextlib.suppress(ValueError):
            local_rank = int(scope.removeprefix(_LAST_SCOPE))  # not so of sets of processes, and of other scopes
            if self._status[local_rank] is Status.CONNECTING:
                self._status[local_rank] = Status.RUNNING

    def loss(self, local_rank: int, seen: int) -> int:
        """Return the number of losses of other workers once there are more than a worker has seen; blocks until then.

        Raises:
            RuntimeError: there will be none.
        """
        with self._changed:
            start = self._starts[local_rank]
            # A worker that asks again has shut down the connections of the generation that lost a worker.
            self._aborting.discard(local_rank)
            self._changed.wait_for(lambda: self._closed or self._starts[local_rank] != start or self._losses > seen)
            if self._closed or self._starts[local_rank] != start:
                raise RuntimeError("The worker's engine has ended.")
            self._aborting.add(local_rank)
            return self._losses

    def notify_at(self, local_rank: int, value: bytes, port: int) -> None:
        """Note where a worker can be notified."""
        self._notify(local_rank, value, port)

    def _new_worker(self, key: str) -> int | None:
        """Return the local rank of the new worker that stores its first address under the key, if there is one."""
        for local_rank, (status, slot) in enumerate(zip(self._status, self._slots, strict=True)):
            if status is Status.STARTING and slot is not None and key == f"rank_{slot.rank}":
                return local_rank
        return None

    def _wait(self, local_rank: int) -> _Generation:
        """Wait for the worker's next generation; the lock is held.

        Raises:
            RuntimeError: the process has been replaced meanwhile, or the engine ends.
        """
        start = self._starts[local_rank]
        self._changed.wait_for(
            lambda: self._closed or self._starts[local_rank] != start or self._status[local_rank] is not Status.WAITING
        )
        if self._closed or self._starts[local_rank] != start or self._generation is None:
            raise RuntimeError("Another process has taken the worker's place.")
        return self._generation
