"""Simulated time: threads of which one runs at a time, and a clock that goes forward when all of them wait."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol


class Killed(BaseException):
    """Ends the thread of a node that was killed: nothing that catches errors catches it."""


class Host(Protocol):
    """What the scheduler asks of the node that a thread belongs to."""

    dead: bool

    def step(self) -> None:
        """Come to a point at which the node may be killed."""

    def ended(self) -> None:
        """Take note that one of the node's threads has ended."""


class Task:
    """One thread that runs only when the scheduler lets it."""

    def __init__(self, scheduler: Scheduler, node: Host | None) -> None:
        self.scheduler = scheduler
        self.node = node
        self.turn = threading.Lock()
        self.turn.acquire()
        self.token = 0  # of the newest wait: an older one's end must not end this one


class Scheduler:
    """Simulated time: what happens when, and whose turn it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.threads = 0
        self._agenda: list[tuple[float, int, Any, int]] = []
        self._numbers = itertools.count()
        self._tasks = threading.local()
        self.main = Task(self, None)
        self._tasks.current = self.main

    @property
    def current(self) -> Task:
        """The task of this thread."""
        return self._tasks.current

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._agenda, (when, next(self._numbers), what, 0))

    def resume(self, task: Task, when: float, token: int) -> None:
        """End the task's wait with this token, if it still lasts."""
        heapq.heappush(self._agenda, (when, next(self._numbers), task, token))

    def wait(self, until: float) -> None:
        """Let others run until this moment, or until this task is resumed with its token.

        Raises:
            Killed: its node was killed meanwhile.
        """
        task = self.current
        self.resume(task, until, task.token)
        self._run(task)
        task.token += 1
        if task.node is not None and task.node.dead:
            raise Killed

    def start(self, task: Task, run: Callable[[], None], name: str) -> None:
        """Start a thread, whose first turn is now."""

        def body() -> None:
            self._tasks.current = task
            task.turn.acquire()
            task.token += 1
            try:
                if not task.node.dead:
                    run()
            finally:
                self.threads -= 1
                task.node.ended()
                self._run(None)

        self.threads += 1
        threading.Thread(target=body, name=name, daemon=True).start()
        self.resume(task, self.now, task.token)

    def _run(self, me: Task | None) -> None:
        """Run what is on the agenda until it is this task's turn; a thread that ends has none and just hands over."""
        while True:
            when, _, what, token = heapq.heappop(self._agenda)
            self.now = max(self.now, when)
            self.events += 1
            if not isinstance(what, Task):
                what()
            elif what.token == token:
                if what is me:
                    return
                what.turn.release()
                if me is not None:
                    me.turn.acquire()
                return


class SimulatedEvent:
    """Replaces ``threading.Event``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[tuple[Task, int]] = []

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task, token in waiting:
            self._scheduler.resume(task, self._scheduler.now, token)

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.current
        if task.node is not None:
            task.node.step()
        if not self._set:
            self._waiting.append((task, task.token))
            self._scheduler.wait(float("inf") if timeout is None else self._scheduler.now + timeout)
            self._waiting = [(other, token) for other, token in self._waiting if other is not task]
        return self._set


class SimulatedThread:
    """Replaces ``threading.Thread``."""

    def __init__(self, scheduler: Scheduler, node: Host, target: Callable[[], None], name: str) -> None:
        self._scheduler = scheduler
        self._node = node
        self._target = target
        self._name = name
        self._ended = SimulatedEvent(scheduler)

    def start(self) -> None:
        def run() -> None:
            try:
                self._target()
            except Killed:
                pass
            finally:
                self._ended.set()

        self._scheduler.start(Task(self._scheduler, self._node), run, self._name)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)
