"""What a node runs over the rounds of a run, in the place of the workers of one program, and its part in an engine."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from azureml_elastic.engines.child import kill_children
from azureml_elastic.environment.engine import EngineEnvironment, take_engine_key
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.worker_messages import Finished, Stopped
from azureml_elastic.train.agent_client.channel import ChannelAgent

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
        key: key that only the run's nodes have, for the engine's own connections.

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

        Raises:
            RuntimeError: it cannot be reached, or the round is over.
        """
        key = take_engine_key()
        return cls(*EngineEnvironment.read().store, key, is_over)

    def set(self, name: str, value: bytes) -> None:
        """Store a value, which all nodes get from then on."""
        name = _PREFIX + name
        self._do(lambda: self._store.set(name, value))  # type: ignore[arg-type]  # bytes are taken as they are
        self._do(lambda: self._store.check([name]))  # whose answer says that the server has it: set() waits for none

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


class Engine(Protocol):
    """A node's part in what a round runs. Its processes may stay over the rounds. Not thread-safe."""

    def enter(self, place: WorkerIdentity, store: RoundStore) -> None:
        """Take part in another round, with what is left of the one before.

        Args:
            place: the node's rank, and the number of nodes.
            store: store of the round. Once it is gone its methods raise ``RuntimeError``, which may be passed on.

        Raises:
            EngineError: a process of the engine has not started.
        """

    def poll(self) -> int | None:
        """Do what is due now; return the exit code of this node's part once it has ended.

        Raises:
            EngineError: a process of the engine has ended that must not.
        """

    def round_over(self) -> None:
        """Do what the end of the round requires before the next one; blocks for some seconds at most."""

    def leave(self) -> bool:
        """Have the others take over what this node holds, and return whether that is done. Called until it is."""

    def stop(self) -> None:
        """End all processes. May be called at any time, and twice."""


_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class NodeEngine:
    """Runs an engine on one node until the program has ended. For the main thread, which starts all children."""

    def __init__(self, engine: Engine, agent: ChannelAgent) -> None:
        self._engine = engine
        self._agent = agent
        self._must_leave = False
        # Both from a thread of the agent's client. The loop below acts on the first. It may block for longer than the
        # agent waits after the second.
        agent.when_asked_to_leave(self._on_leave)
        agent.when_lost(kill_children)

    def run(self) -> int:
        """Take part in all rounds until the program has ended, and return the exit code: the program's, or 0.

        Raises:
            EngineError: a process of the engine has not started, or has ended.
        """
        code = None
        try:
            while code is None:
                self._agent.park()
                code = self._take_part(self._agent.wait_for_place())
            if code == 0 and not self._must_leave:
                self._agent.report(Finished(0))
        finally:
            self._engine.stop()
        return code

    def _take_part(self, place: WorkerIdentity) -> int | None:
        """Take part in one round; return the exit code of this process, ``None`` where another round follows."""
        try:
            store = RoundStore.of_environment(lambda: self._agent.wait_interrupted(0))
        except RuntimeError as error:
            self._wait_for_the_end(place, error)
            return None
        try:
            self._engine.enter(place, store)
            while not self._agent.wait_interrupted(_POLL_SECONDS):
                if self._must_leave:  # in the place of poll(): a node that leaves begins nothing new
                    if self._engine.leave():
                        self._engine.stop()
                        self._agent.report(Stopped(0))
                        return 0
                elif (code := self._engine.poll()) is not None:
                    return code
            self._engine.round_over()
        except RuntimeError as error:
            # Of the store, which ends with rank 0's agent. Nothing tells whether that node, the network or the round
            # has ended: the agent will.
            self._wait_for_the_end(place, error)
        finally:
            store.close()
        return None

    def _wait_for_the_end(self, place: WorkerIdentity, error: RuntimeError) -> None:
        """Wait until the agent knows that the round is over, whose store is gone."""
        _LOG.info("The store of round %d is gone: %s", place.round, error)
        while not self._agent.wait_interrupted(_POLL_SECONDS):
            pass

    def _on_leave(self) -> None:
        self._must_leave = True
