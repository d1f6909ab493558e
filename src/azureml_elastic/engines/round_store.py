"""What the nodes of a round agree on, in the store of rank 0's agent, and the key that only they have."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from azureml_elastic.environment.engine import EngineEnvironment, take_engine_key

__all__ = ["RoundStore"]

_T = TypeVar("_T")

_PREFIX = "engine/"
_TIMEOUT = timedelta(seconds=10)
_LOOK_SECONDS = 0.02


class RoundStore:
    """The store of one round. It ends with the round: then every method raises ``RuntimeError``. Thread-safe.

    torch's client waits without a limit for a server that neither answers nor ends, as on a frozen machine. A thread of
    its own therefore speaks to the server, and methods give up once the round is over.

    Args:
        host: address of rank 0's agent.
        port: port of the store.
        key: key that only the run's nodes have, for the engine's own connections.
        is_over: function that returns whether the round is over.

    Raises:
        RuntimeError: the store cannot be reached, or the round is over.
    """

    def __init__(self, host: str, port: int, key: bytes, is_over: Callable[[], bool]) -> None:
        self.key = key
        self._is_over = is_over
        self._closed = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="round-store", daemon=True).start()
        self._store = self._do(lambda: TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False))

    @classmethod
    def of_environment(cls, is_over: Callable[[], bool]) -> Self:
        """Connect to the store of the round that this process has been assigned to.

        The key is removed from the environment, so that no child process inherits it.

        Args:
            is_over: function that returns whether the round is over.

        Raises:
            RuntimeError: it cannot be reached, or the round is over.
        """
        key = take_engine_key()
        return cls(*EngineEnvironment.read().store, key, is_over)

    def set(self, name: str, value: bytes) -> None:
        """Store a value."""
        name = _PREFIX + name
        self._do(lambda: self._store.set(name, value))  # type: ignore[arg-type]  # bytes are taken as they are

    def get(self, name: str) -> bytes | None:
        """Return a value, ``None`` while there is none."""
        name = _PREFIX + name
        return self._do(lambda: bytes(self._store.get(name)) if self._store.check([name]) else None)

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, which begins with 0, and return it."""
        name = _PREFIX + name
        return self._do(lambda: int(self._store.add(name, amount)))

    def close(self) -> None:
        """Have all methods raise from now on."""
        self._closed = True
        self._calls.put(None)

    def _do(self, call: Callable[[], _T]) -> _T:
        result: Future[_T] = Future()
        self._calls.put((result, call))
        while not result.done():
            with contextlib.suppress(FuturesTimeoutError):
                return result.result(_LOOK_SECONDS)
            if self._closed or self._is_over():
                raise RuntimeError("The round is over.")
        return result.result()

    def _run(self) -> None:
        while (pending := self._calls.get()) is not None:
            result, call = pending
            try:
                result.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                result.set_exception(error)
