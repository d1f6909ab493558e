"""Collection of the preemption notices of a node."""

from __future__ import annotations

import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from types import FrameType

from azureml_elastic.config.exit_codes import PREEMPTED
from azureml_elastic.config.policies import PreemptionPolicy
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.preemption.notices import Announcement, MarkerFile, Notice, PolledSource, merge
from azureml_elastic.node.preemption.scheduled_events import ScheduledEvents

_LOG = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNAL_BASE = 128

_POLL_SECONDS = 1.0


class PreemptionWatcher:
    """Collector of preemption notices from SIGTERM and SIGINT, Azure's scheduled events, and a marker file.

    Events and the file can be withdrawn, which resets :attr:`noticed`, until the node has committed itself to leave. A
    signal cannot be withdrawn, and repeated signals, which Azure sends, do not cut a save short.

    Args:
        node: this node's name, for the path of the marker file.
    """

    def __init__(
        self, policy: PreemptionPolicy, to_wake: EventQueue, node: str = "", *, interval: float = _POLL_SECONDS
    ) -> None:
        self._policy = policy
        self._grace = policy.grace.total_seconds()
        self._queue = to_wake
        self._lock = threading.Lock()
        # The signal handler may interrupt a holder of the lock, so it only assigns this attribute and fills the queue.
        self._signalled: Notice | None = None
        self._active: Mapping[str, Notice] = {}
        self._final: Notice | None = None
        # Setting an event is not safe in a signal handler, which may interrupt the holder of its lock; this queue is.
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._wake_on_changes, name="preemption", daemon=True).start()
        self._sources: list[PolledSource] = []
        if policy.scheduled_events is not None:
            self._sources.append(
                ScheduledEvents(
                    policy.scheduled_events,
                    partial(self.announce, "event"),
                    host_name=socket.gethostname(),
                    interval=interval,
                )
            )
        if policy.marker is not None:
            path = policy.marker.replace("{node}", node)
            self._sources.append(MarkerFile(path, partial(self.announce, "marker"), interval=interval))

    def listen(self) -> None:
        """Install the signal handlers; must be called again after another library has replaced them."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._on_signal)

    def watch(self) -> None:
        """Start polling events and the marker file."""
        for source in self._sources:
            source.start()

    def close(self) -> None:
        """Stop polling, without waiting for a request in progress."""
        for source in self._sources:
            source.stop()
        self._changes.put(False)

    @property
    def noticed(self) -> bool:
        """Whether there is an active notice."""
        return bool(self._notices())

    @property
    def seconds_left(self) -> float:
        """Seconds that the workers have until the first deadline; infinite without a notice."""
        until = min((notice.until for notice in self._notices()), default=float("inf"))
        return max(0.0, until - time.monotonic())

    @property
    def reason(self) -> str:
        """Description of the first notice."""
        notice = self._first()
        return "no notice" if notice is None else notice.reason

    @property
    def exit_code(self) -> int:
        """Exit code of the first notice: that of SIGTERM, or of SIGINT after that signal."""
        notice = self._first()
        return PREEMPTED if notice is None else notice.exit_code

    def commit_to_leave(self) -> bool:
        """Make the notice final, because this node is about to announce that it leaves.

        Returns:
            Whether this node leaves; false if there is no active notice.
        """
        with self._lock:
            # From here on a withdrawal changes nothing: other nodes act on the announcement that follows.
            self._final = self._final or self._first()
            return self._final is not None

    def announce(self, source: str, announced: Mapping[str, Announcement]) -> None:
        """Replace the announcements of a source; those that are missing are withdrawn."""
        with self._lock:
            before = self._active
            self._active = merge(
                before, source, announced, now=time.monotonic(), grace=self._grace, exit_code=PREEMPTED
            )
            added = [notice for key, notice in self._active.items() if key not in before]
            removed = [notice for key, notice in before.items() if key not in self._active]
            final = self._final is not None
        for notice in added:
            _LOG.warning("Notice: %s. This node must leave.", notice.reason)
        for notice in removed:
            _LOG.warning("Withdrawn: %s%s.", notice.reason, ", too late: this node leaves" if final else "")
        if added or removed:
            self._changes.put(True)

    def _notices(self) -> list[Notice]:
        notices = (self._final, self._signalled, *self._active.values())
        return [notice for notice in notices if notice is not None]

    def _first(self) -> Notice | None:
        return self._final or min(self._notices(), key=lambda notice: notice.since, default=None)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self._signalled is None:
            announcement = Announcement(signal.Signals(signum).name)
            code = _SIGNAL_BASE + signum
            self._signalled = Notice.of(announcement, time.monotonic(), self._grace, code)
            self._changes.put(True)

    def _wake_on_changes(self) -> None:
        while self._changes.get():
            self._queue.wake()
