"""One node's part in an engine over all rounds of a run, in the place of the node's worker."""

from __future__ import annotations

import logging

from azureml_elastic.engines.engine import Engine
from azureml_elastic.engines.round_store import RoundStore
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.worker_messages import Connected, Finished, Stopped
from azureml_elastic.train.agent_client.channel import ChannelAgent

__all__ = ["NodeEngine"]

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class NodeEngine:
    """Runs an engine on one node until the program has ended. For the main thread.

    Args:
        engine: engine.
        agent: connection to the node's agent.
    """

    def __init__(self, engine: Engine, agent: ChannelAgent) -> None:
        self._engine = engine
        self._agent = agent
        self._must_leave = False
        agent.when_asked_to_leave(self._on_leave)

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
            self._agent.report(Connected())
            self._engine.enter(place, store)
            while not self._agent.wait_interrupted(_POLL_SECONDS):
                if self._must_leave:
                    if self._engine.leave():
                        self._engine.stop()
                        self._agent.report(Stopped(0))
                        return 0
                elif (code := self._engine.poll()) is not None:
                    return code
            self._engine.round_over()
        except RuntimeError as error:
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
