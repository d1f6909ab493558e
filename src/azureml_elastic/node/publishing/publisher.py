"""Publishes on threads of their own, one for each destination, so that none of them delays or fails the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import MissingExtra
from azureml_elastic.ledger.events import Event
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.publishing.mlflow import MlflowPublisher, mlflow_target
from azureml_elastic.node.publishing.opentelemetry import open_otlp
from azureml_elastic.node.publishing.tensorboard import TensorBoardPublisher
from azureml_elastic.node.publishing.translation import Publisher, Translation, Update

_LOG = logging.getLogger(__name__)

_MOST_EVENTS = 10_000
"""Largest number of events, and of updates, that wait to be published."""

_FLUSH_SECONDS = 5.0
_OPENING_SECONDS = 60.0
"""Limit for what opens a destination at the end of a node, such as imports on a machine with much to do."""
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class PublishingThread:
    """Translates events and publishes them to one destination.

    Args:
        open_publisher: function that opens the destination; called before the first update, as its packages take
            seconds to import.
    """

    def __init__(self, name: str, open_publisher: Callable[[], Publisher]) -> None:
        self._name = name
        self._open = open_publisher
        self._queue: queue.Queue[Event | None] = queue.Queue(_MOST_EVENTS)
        self._closing = threading.Event()
        self._over = threading.Event()
        self._opening = threading.Event()
        self._opened = threading.Event()
        self._warned = self._dropped = False
        self._thread = threading.Thread(target=self._run, name=f"publish to {name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Have an event published, unless too many wait already. Returns at once."""
        # Its thread has ended: the queue would fill up for nobody.
        if self._over.is_set():
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._warn_of_drop()

    def begin_closing(self) -> None:
        """Have the thread publish what waits, try a failing destination once more, and end."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # the thread is awake then
            self._queue.put_nowait(None)

    def join(self, until: float) -> None:
        """Wait for the end of the thread.

        Args:
            until: monotonic seconds at which the rest is given up.
        """
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._opening.is_set() and not self._opened.is_set():
            # A short run ends while packages are imported; the values that it is about are lost unless this is waited
            # for. It says nothing about the destination, which then has the whole time.
            self._opened.wait(_OPENING_SECONDS)
            self._thread.join(_FLUSH_SECONDS)
        if self._thread.is_alive():
            _LOG.warning(
                "Not everything was published to %s within %g s; the rest is lost.", self._name, _FLUSH_SECONDS
            )

    def _run(self) -> None:
        translation = Translation()
        publisher: Publisher | None = None
        waiting: list[Update] = []
        pause = 0.0
        try:
            while True:
                # Read before the queue: what was put into it until then is still published.
                ended = self._closing.is_set()
                waiting += [update for event in self._take(pause) if (update := translation.add(event))]
                if waiting:
                    try:
                        publisher = publisher or self._open_once()
                        publisher.publish(waiting)
                        waiting, pause = [], 0.0
                    except MissingExtra as error:
                        _LOG.warning("Nothing is published to %s: %s", self._name, error)
                        return
                    except Exception as error:  # noqa: BLE001 - of another package, and never the run's
                        pause = min(_LONGEST_PAUSE_SECONDS, pause * 2 or _FIRST_PAUSE_SECONDS)
                        self._warn(error)
                        waiting = self._bounded(waiting)
                if ended and self._queue.empty():
                    return
        finally:
            self._over.set()
            if publisher is not None:
                self._close(publisher)

    def _open_once(self) -> Publisher:
        self._opening.set()
        try:
            return self._open()
        finally:
            self._opened.set()

    def _take(self, pause: float) -> Sequence[Event]:
        """Return the events that wait; before, wait for the first one, or for the end of a pause."""
        events: list[Event] = []
        if pause:
            self._closing.wait(pause)
        elif not self._closing.is_set():
            events += self._get(block=True)
        while not self._queue.empty() and len(events) < _MOST_EVENTS:
            events += self._get(block=False)
        return events

    def _get(self, *, block: bool) -> list[Event]:
        event = self._queue.get(block)
        return [] if event is None else [event]

    def _bounded(self, waiting: list[Update]) -> list[Update]:
        if len(waiting) > _MOST_EVENTS:
            self._warn_of_drop()
        return waiting[-_MOST_EVENTS:]

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "Publishing to %s fails and is tried again until the run ends: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )
        _LOG.debug("Publishing to %s has failed.", self._name, exc_info=error)

    def _warn_of_drop(self) -> None:
        if not self._dropped:
            self._dropped = True
            _LOG.warning("More than %d events wait for %s; some are not published.", _MOST_EVENTS, self._name)

    def _close(self, publisher: Publisher) -> None:
        try:
            publisher.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(error)


class Publishing:
    """All destinations of a node."""

    def __init__(self, threads: Sequence[PublishingThread]) -> None:
        self._threads = threads

    def put(self, event: Event) -> None:
        """Have an event published everywhere. Returns at once."""
        for thread in self._threads:
            thread.put(event)

    def close(self) -> None:
        """Publish what is waiting, for a short time once the destinations are open."""
        until = time.monotonic() + _FLUSH_SECONDS
        for thread in self._threads:
            thread.begin_closing()
        for thread in self._threads:
            thread.join(until)


def open_publishing(identity: NodeIdentity, environment: NodeEnvironment) -> Publishing:
    """Return the destinations of a node, which are opened when there is something to publish."""
    policy = identity.plan.metrics
    threads: list[PublishingThread] = []
    target = mlflow_target(identity.plan, identity.run_id, environment)
    if target is not None:
        threads.append(PublishingThread("MLflow", partial(MlflowPublisher, target)))
    if policy.tensorboard is not None:
        folder = Path(environment.expand(policy.tensorboard))
        threads.append(PublishingThread("TensorBoard", partial(TensorBoardPublisher, folder, identity.node)))
    if environment.exports_opentelemetry:
        opened = partial(open_otlp, identity.run_id, identity.node, environment)
        threads.append(PublishingThread("OpenTelemetry", opened))
    return Publishing(threads)
