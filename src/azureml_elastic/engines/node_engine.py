"""One node's part in an engine's cluster over all rounds of a run, in the place of the node's worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from azureml_elastic.engines.children import Child
from azureml_elastic.engines.engine import Engine
from azureml_elastic.engines.round_store import RoundStore
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.channel import ChannelAgent

__all__ = ["NodeEngine"]

_LOG = logging.getLogger(__name__)

_FIRST_POLL_SECONDS = 0.1
_POLL_SECONDS = 0.5


class NodeEngine:
    """Runs an engine on one node until the program has ended. For the main thread.

    Args:
        engine: engine.
        agent: connection to the node's agent.
        program: command of the program.
    """

    def __init__(self, engine: Engine, agent: ChannelAgent, program: Sequence[str]) -> None:
        self._engine = engine
        self._agent = agent
        self._command = tuple(program)
        self._must_leave = False
        self._leads = False
        self._address: str | None = None
        """Address of the head that this node's member is connected to, or that is on this node."""
        self._member: Child | None = None
        self._program: Child | None = None
        agent.when_asked_to_leave(self._on_leave)

    def run(self) -> int:
        """Take part in all rounds until the program has ended, and return the exit code: the program's, or 0.

        Raises:
            EngineError: the head has not started, or has ended.
        """
        code = None
        try:
            while code is None:
                code = self._take_part(self._agent.park())
            if code == 0 and not self._must_leave:
                self._agent.finished(0)
        finally:
            self._stop()
        return code

    def _take_part(self, place: WorkerIdentity) -> int | None:
        """Take part in one round; return the exit code of this process, ``None`` where another round follows."""
        if self._leads and place.rank > 0:
            self._stop()  # this node was thought to be lost, and another one has the head and the program
        try:
            store = RoundStore.of_environment()
            self._agent.connected()
            if place.rank == 0:
                self._lead(store)
            while not self._agent.wait_interrupted(_POLL_SECONDS if self._member else _FIRST_POLL_SECONDS):
                code = self._look(store)
                if code is not None:
                    return code
        except RuntimeError as error:  # of torch: the store is gone, and with it the round
            _LOG.info("The store of round %d is gone: %s", place.round, error)
            while not self._agent.wait_interrupted(_POLL_SECONDS):
                pass
        return None

    def _look(self, store: RoundStore) -> int | None:
        """Do what is due now; return the exit code of this process if it has to end."""
        if self._must_leave:
            self._leave()
            return 0
        if self._program is not None:
            self._engine.check()
            if (code := self._program.exit_code) is not None:
                return 128 - code if code < 0 else code
        address = store.address()
        if address is not None:
            self._follow(address)
        return None

    def _lead(self, store: RoundStore) -> None:
        """Have the head and the program on this node: those of the round before, if they are here."""
        if not self._leads:
            self._stop()
            self._address = self._engine.start_head()
            self._leads = True
        assert self._address is not None
        store.set_address(self._address)
        self._follow(self._address)
        if self._program is None:
            self._program = Child(self._command, self._engine.variables(self._address))

    def _follow(self, address: str) -> None:
        """Have a member that is connected to this head."""
        if self._member is not None and self._address == address:
            if (code := self._member.exit_code) is None:
                return
            _LOG.warning("The node's member of the cluster has ended with %d; starting another one.", code)
        self._stop_member()
        self._address = address
        self._member = self._engine.start_member(address)

    def _leave(self) -> None:
        """Move what this node holds to others. Where it has the head, all is lost with it."""
        if self._member is not None and self._address is not None and not self._leads:
            self._engine.retire_member(self._address)
        self._stop()
        self._agent.stopped(0)

    def _stop(self) -> None:
        """End the program, the member and the head."""
        if self._program is not None:
            self._program.stop()
            self._program = None
        self._stop_member()
        self._engine.stop_head()
        self._leads, self._address = False, None

    def _stop_member(self) -> None:
        if self._member is not None:
            self._member.stop(timeout=0)
            self._member = None

    def _on_leave(self) -> None:
        self._must_leave = True
