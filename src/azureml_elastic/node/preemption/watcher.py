"""The notice that this node is about to be taken away, from whatever source it comes."""

from __future__ import annotations

import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType

from azureml_elastic.config.distribution import PreemptionPolicy
from azureml_elastic.config.exit_codes import PREEMPTED
from azureml_elastic.node.preemption.marker import MarkerFileWatcher
from azureml_elastic.node.preemption.notices import Announcement, Notice, first, merge
from azureml_elastic.node.preemption.scheduled_events import ScheduledEventsWatcher

__all__ = ["PreemptionWatcher"]

_LOG = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNAL_BASE = 128


class PreemptionWatcher:
    """Gathers the notices: SIGTERM and SIGINT, Azure's scheduled events, and a marker file.

    Events and the file can be withdrawn, and then :attr:`noticed` is false again, until the node has committed itself
    to leave. A signal is for good, and a second one no more urgent than the first: Azure repeats itself, and a save
    must not be cut short.

    Args:
        policy: preemption policy of the plan.
        wake: called, from a thread, when a notice has come or was withdrawn.
        node: this node's name, for the marker's path.
    """

    def __init__(self, policy: PreemptionPolicy, wake: Callable[[], None], node: str = "") -> None:
        self._policy = policy
        self._grace = policy.grace.total_seconds()
        self._wake = wake
        self._lock = threading.Lock()
        # A signal handler may interrupt anything, also a holder of the lock that it would need: it sets and puts only.
        self._signalled: Notice | None = None
        self._standing: Mapping[str, Notice] = {}
        self._final: Notice | None = None
        self._to_tell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._tell, name="preemption", daemon=True).start()
        interval = policy.poll_interval.total_seconds()
        self._events: ScheduledEventsWatcher | None = None
        if policy.scheduled_events is not None:
            self._events = ScheduledEventsWatcher(
                policy.scheduled_events,
                lambda announced: self.announce("event", announced),
                host_name=socket.gethostname(),
                lead=policy.lead.total_seconds(),
                interval=interval,
            )
        self._marker: MarkerFileWatcher | None = None
        if policy.marker is not None:
            path = policy.marker.replace("{node}", node)
            self._marker = MarkerFileWatcher(
                path, lambda announced: self.announce("marker", announced), interval=interval
            )

    def listen(self) -> None:
        """Take the signals; to be called again whenever someone else has taken them."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._on_signal)

    def watch(self) -> None:
        """Begin to look for events and the marker, on threads of their own: nobody waits for the first answer."""
        for source in (self._events, self._marker):
            if source is not None:
                source.start()

    def close(self) -> None:
        """Stop looking, without waiting for a request that is under way."""
        for source in (self._events, self._marker):
            if source is not None:
                source.stop()
        self._to_tell.put(False)

    @property
    def noticed(self) -> bool:
        """Whether this node must go, as far as is known now."""
        return bool(self._notices())

    @property
    def overdue(self) -> bool:
        """Whether the workers have had their time."""
        now = time.monotonic()
        return any(now >= notice.until for notice in self._notices())

    @property
    def reason(self) -> str:
        """What announced it first."""
        notice = self._first()
        return "no notice" if notice is None else notice.reason

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that SIGTERM ended, whatever announced it; after SIGINT as that."""
        notice = self._first()
        return PREEMPTED if notice is None else notice.exit_code

    def commit_to_leave(self) -> bool:
        """Make the notice final, because this node is about to announce that it leaves.

        Returns:
            Whether this node leaves. If not, there was no notice, or it has just been withdrawn.
        """
        with self._lock:
            self._final = self._final or self._first()
            return self._final is not None

    def announce(self, source: str, announced: Mapping[str, Announcement]) -> None:
        """Take all that a source says now; what it said before and does not say any more is withdrawn.

        Args:
            source: its name.
            announced: announcements by their keys.
        """
        with self._lock:
            before = self._standing
            self._standing = merge(
                before, source, announced, now=time.monotonic(), grace=self._grace, exit_code=PREEMPTED
            )
            added = [notice for key, notice in self._standing.items() if key not in before]
            removed = [notice for key, notice in before.items() if key not in self._standing]
            final = self._final is not None
        for notice in added:
            _LOG.warning("Notice: %s. This node must leave.", notice.reason)
        for notice in removed:
            _LOG.warning("Withdrawn: %s%s.", notice.reason, ", too late: this node leaves" if final else "")
        if added or removed:
            self._to_tell.put(True)

    def acknowledge(self) -> None:
        """Tell Azure that the event for which this node has left may start, if the policy says so. Never raises."""
        notice = self._first()
        if not self._policy.acknowledge or self._events is None or notice is None:
            return
        if notice.event is not None:
            self._events.acknowledge(notice.event)
        else:
            _LOG.info("Nothing is acknowledged: %s is no event of this machine alone.", notice.reason)

    def _notices(self) -> list[Notice]:
        notices = (self._final, self._signalled, *self._standing.values())
        return [notice for notice in notices if notice is not None]

    def _first(self) -> Notice | None:
        return self._final or first(self._notices())

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self._signalled is None:
            announcement = Announcement(signal.Signals(signum).name)
            code = _SIGNAL_BASE + signum
            self._signalled = Notice.of(announcement, time.monotonic(), self._grace, code)
            self._to_tell.put(True)

    def _tell(self) -> None:
        while self._to_tell.get():
            self._wake()
