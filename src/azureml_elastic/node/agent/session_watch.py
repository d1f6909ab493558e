"""Programs that train without a session: what follows for their restarts is said, and recorded that they train."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from azureml_elastic.forks.optimizer_steps import read_training
from azureml_elastic.forks.state_files import read_lookups
from azureml_elastic.ledger.events import TrainsWithoutSession
from azureml_elastic.node.agent.newcomer_watch import name_lookups

_LOG = logging.getLogger(__name__)

_IMPORT_SECONDS = 30.0
"""Time in which a program opens its session, after the start of its workers."""

_CONNECT_SECONDS = 3.0
"""The same, once its ranks begin to connect to each other."""

_REPORT_SECONDS = 1.0, 2.0
"""Time in which a session reports that it has begun, after a first backward pass; and where one has been opened."""


def describe_restarts(lookups: Collection[str]) -> str:
    """Return what happens to a program without a session when the nodes change.

    Args:
        lookups: where it has looked before its first step.
    """
    begin = (
        "The script trains without a session of this library. When a node is lost or comes, it is started again "
        "from its first line, "
    )
    end = "docs/how-to/stacks/index.md says how a script goes on."
    if named := name_lookups(lookups):
        return (
            f"{begin}and goes on from what it reads there: all that it has not saved and reads back is trained again. "
            f"It has looked for {named}. {end}"
        )
    return f"{begin}and trains all its steps again, as it has not looked for a saved state before its first one. {end}"


class SessionWatch:
    """Looks on rank 0's node whether the workers train without a session, until that is known. For the agent's thread.

    Args:
        folder: folder of the agent's socket, in which the workers note what they do.
        record: function that records an event of a kind in the ledger.
    """

    def __init__(
        self,
        folder: Path,
        record: Callable[[type[TrainsWithoutSession]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._record = record
        self._clock = clock
        self._began: float | None = None
        self._connecting: float | None = None
        self._training: float | None = None
        self._recorded = self._done = False

    def session_has_begun(self) -> None:
        """Look no more: the program does not train without a session."""
        self._done = True

    def look(self, pids: Sequence[int], *, connecting: bool, opened: bool) -> None:
        """Look once; to be called several times a second until a session has begun.

        Args:
            pids: processes of the workers.
            connecting: whether workers of the round have begun to connect to each other.
            opened: whether a worker has opened a session, which perhaps takes no part in its training.
        """
        if self._done:
            return
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._connecting = None if not connecting else now if self._connecting is None else self._connecting
        connects = self._connecting is not None and now - self._connecting >= _CONNECT_SECONDS
        if any(any(read_training(self._folder, pid).steps) for pid in pids):
            self._training = now if self._training is None else self._training
        else:
            self._training = None
        trains = self._training is not None and now - self._training >= _REPORT_SECONDS[opened]
        late = not opened and (connects or now - self._began >= _IMPORT_SECONDS)
        if not self._recorded and (trains or late):
            self._recorded = True
            self._record(TrainsWithoutSession)
        if trains:
            self._done = True
            lookups = read_lookups(self._folder, pids)
            _LOG.log(logging.INFO if lookups else logging.WARNING, "%s", describe_restarts(lookups))
