"""What is seen of the rounds of a script without a session, in the ledger."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

from azureml_elastic.ledger.events import RanksConnecting, StateSaved
from azureml_elastic.node.agent.saved_files import scan
from azureml_elastic.node.io.event_recorder import Recorder
from azureml_elastic.node.preload.state_lookups import Lookups

__all__ = ["ObservationLog"]


class ObservationLog:
    """Writer of when workers begin to connect to each other, and of the last save of each round.

    Args:
        recorder: writer of the ledger's events.
        excluded: folder below those of the program that is not read.
    """

    def __init__(self, recorder: Recorder, excluded: Path | None = None) -> None:
        self._recorder = recorder
        self._excluded = excluded
        self._number = 0
        self._connecting = self._alone = False
        self._since = 0.0

    def entered(self, number: int, world_size: int) -> None:
        """The node has entered a round.

        Args:
            number: number of the round.
            world_size: number of workers of the round; a single one may train without having connected.
        """
        self._number, self._connecting, self._alone = number, False, world_size == 1
        self._since = time.time()

    def connecting(self, *, record: bool) -> None:
        """The workers of the round have begun to connect to each other; called again and again from then on.

        Args:
            record: whether this node is to write it.
        """
        if not self._connecting:
            self._connecting, self._since = True, time.time()
            if record:
                self._recorder.record(RanksConnecting, self._number, self._since)

    def left(self, lookups: Lookups) -> threading.Thread | None:
        """Record the last save of the round, on a thread: a mount may not answer for minutes.

        Only what was saved since the workers began to connect counts, as what was saved before is prepared data. The
        times are those of the storage, which may have another clock: the report gives work for kept or lost by them,
        and nothing else follows.

        Args:
            lookups: where this node's workers have looked at their start: from what is there, the script continues.
        """
        if not (self._connecting or self._alone):
            return None
        span = self._since, time.time()
        thread = threading.Thread(target=self._record_save, args=(self._number, lookups, *span), daemon=True)
        thread.start()
        return thread

    def _record_save(self, number: int, lookups: Lookups, since: float, until: float) -> None:
        found = scan(lookups, self._excluded)
        files = [pair for seen in found.values() for pair in seen.files.items()]
        # Libraries leave files in the temporary folder itself, as torch does the error of a process that it spawned.
        passing = tempfile.gettempdir()
        times = [stamp[0] / 1e9 for path, stamp in files if os.path.dirname(path) != passing]  # noqa: PTH120 - a text
        saves = [at for at in times if since <= at <= until]
        if saves:
            self._recorder.record(StateSaved, number, max(saves))
