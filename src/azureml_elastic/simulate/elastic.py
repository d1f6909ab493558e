"""An elastic run in simulated time: rounds of nodes that come and go, by the decisions of the agents themselves.

Whether an open round is sealed, and with which members, is decided by :class:`SealTimer` and :func:`seal`, what follows
a round by :func:`reopened`, when it makes room for spares by :class:`HubView` and :func:`ends_soon`, how long a
preempted node may stay by :class:`Notice`. Simulated are the durations between these decisions. Nodes are added and
taken away by the caller.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.config import CheckpointPolicy, PreemptionPolicy, RendezvousTimings
from azureml_elastic.ledger.accounting import Activity, Cause
from azureml_elastic.node.core.boundary import ends_soon
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.pauses import SilenceLimit
from azureml_elastic.node.core.round import Limits, Member, Round, reopened
from azureml_elastic.node.core.sealing import SealTimer, candidates, seal
from azureml_elastic.node.preemption.notices import Announcement, Notice
from azureml_elastic.simulate.accounts import Accounts, Life, exact, later
from azureml_elastic.simulate.scenario import Parameters
from azureml_elastic.simulate.training import Training


@dataclass
class Process:
    """Process of a node. Its seconds are accounted up to ``at``; those of members while they train, by ``Training``.

    Args:
        at: time up to which its seconds are accounted.
        ready: whether it may be in a round.
        entered: whether it has been in one.
        waiting_since: time since which it waits for a round.
        activity: what it does since ``at``.
    """

    name: str
    pool: int
    began: float
    at: float
    ready: bool = False
    entered: bool = False
    waiting_since: float = 0.0
    activity: Activity = "starting"
    cause: Cause | None = None


class Processes(dict[str, Process]):
    """Running processes by the name of their node."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self._accounts = accounts

    def start(self, name: str, pool: int, now: float) -> Process:
        """Start the process of a node."""
        process = self[name] = Process(name, pool, now, now)
        return process

    def mark(self, processes: Iterable[Process], now: float, activity: Activity, cause: Cause | None = None) -> None:
        """Account for the time of processes until now, and let them continue with an activity."""
        # With a thousand nodes most have done the same since the same time: one entry for all of these. Products of
        # the times are as exact as their sums.
        spans: dict[tuple[Activity, float, Cause | None], int] = {}
        for process in processes:
            span = process.activity, process.at, process.cause
            spans[span] = spans.get(span, 0) + 1
            process.at, process.activity, process.cause = now, activity, cause
        for (done, since, why), count in spans.items():
            self._accounts.add(done, (now - since) * count, why)

    def end(self, name: str, now: float) -> None:
        """End the process of a node."""
        process = self.pop(name)
        self.mark([process], now, "idle")
        self._accounts.lives.append(Life(name, process.pool, process.began, now))


class Timers:
    """Actions in the order of their time; those of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def next(self) -> float:
        """Time of the next action; infinite without one."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, time: float, action: Callable[[], None]) -> None:
        """Add an action."""
        heapq.heappush(self._heap, (time, next(self._numbers), action))

    def fire(self) -> None:
        """Do the next action."""
        heapq.heappop(self._heap)[2]()


_Phase = Literal["open", "entering", "training", "broken", "ended"]
"""``entering`` lasts from the seal to the first step, ``broken`` from a silent loss to its detection."""


class ElasticRun:
    """An elastic run.

    Attributes:
        now: time in seconds since the submission.
        nodes: running processes by the names of their nodes.
        over: whether the run has ended.
    """

    def __init__(
        self,
        work: int,
        limits: Limits,
        parameters: Parameters,
        checkpoint: CheckpointPolicy | None = None,
        timings: RendezvousTimings | None = None,
    ) -> None:
        self.now = 0.0
        self.accounts = Accounts()
        self.training = Training(work, parameters, checkpoint or CheckpointPolicy(), self.accounts)
        self.nodes = Processes(self.accounts)
        self.over = False
        self.rounds = 0
        self._limits, self._parameters, self._timings = limits, parameters, timings or RendezvousTimings()
        self._grace = PreemptionPolicy().grace.total_seconds()
        self._round = Round()
        self._seal_timer = SealTimer(self._round, self._limits, self._timings)
        self._phase: _Phase = "open"
        self._sealed_at = 0.0
        self._cause: Cause = "scale-up"
        self._members: list[str] = []
        self._holders: set[str] = set()  # members with the newest state in memory
        self._lost: set[str] = set()
        self._leavers: dict[str, Cause] = {}
        self._boundary: int | None = None
        self._wake, self._on_wake = math.inf, self._try_seal  # when the phase goes on by itself, and how
        self._timers = Timers()

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the nodes of the sealed round in rank order; none while a round is open."""
        return tuple(self._members)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def add(self, name: str, pool: int = 0, ready_in: float | None = None) -> None:
        """Start the process of a node.

        Args:
            ready_in: seconds until it is ready; by default those of the parameters.
        """
        node = self.nodes.start(name, pool, self.now)
        if ready_in is None:
            joins = self._phase != "open" or self._round.number > 1
            ready_in = self._parameters.start_seconds + (self._parameters.preload_seconds if joins else 0.0)
        self._timers.add(self.now + exact(ready_in), lambda: self._is_ready(node))

    def lose(self, name: str, *, silent: bool = True, cause: Cause = "node loss") -> None:
        """End the process of a node at once.

        Args:
            silent: whether the others notice it by its silence only, as when a machine is gone; otherwise its
                connections break at once.
        """
        self._break(name, cause)
        self.nodes.end(name, self.now)
        if self._phase == "open":
            seconds = SilenceLimit(self._timings).shortest if silent else 0.0
            self._timers.add(self.now + exact(seconds), lambda: self._is_gone(name))  # until then it is waited for
        elif name in self._lost:
            self._detect(silent=silent)

    def _is_gone(self, name: str) -> None:
        if self._phase == "open":
            self._lost.add(name)
            self._wake_at(self.now, self._try_seal)

    def freeze(self, name: str, seconds: float) -> None:
        """Stop the process of a node for a time. If no other member notices it by then, training goes on."""
        # A node that is alone is missed by nobody, and a short pause is no silence.
        noticed = seconds >= SilenceLimit(self._timings).shortest and len(self._survivors) > 1
        if noticed or self._phase != "training" or name not in self._members:
            node = self.nodes[name]
            if name in self._members and self._phase in ("training", "entering", "broken"):
                self._break(name, "node loss")
                self._mark([node], "recovering", "node loss")
                self._detect(silent=True)
            node.ready = False
            self._timers.add(self.now + exact(seconds), lambda: self._is_ready(node))
            return
        self._interrupt(None)
        self._phase = "broken"
        self._wake_at(self.now + exact(seconds), self._go_on)

    def preempt(self, name: str, seconds_left: float) -> None:
        """Announce the loss of a node's machine: it leaves at a step boundary, or at its deadline."""
        notice = Notice.of(Announcement("", seconds_left), self.now, self._grace, 0)
        self.leave(name, "preemption")
        if (node := self.nodes.get(name)) is not None:
            self._timers.add(exact(notice.until), lambda: self._is_overdue(node))

    def _is_overdue(self, node: Process) -> None:
        if self.nodes.get(node.name) is node and not self.over:
            self.lose(node.name, silent=False, cause="preemption")

    def leave(self, name: str, cause: Cause = "scale-up") -> None:
        """Let a node leave: at the next step boundary if it trains, otherwise at once."""
        if self._phase == "training" and name in self._members:
            self._leavers[name] = cause
            self._propose_boundary()
        elif self._phase == "entering" and name in self._members:
            self._leavers[name] = cause
        else:
            self.lose(name, silent=False)

    # --- time --------------------------------------------------------------------------------------------------------

    def advance(self, until: float = math.inf, step: int | None = None) -> None:
        """Let time pass until a moment, until a step is completed, or until the run is over or nothing more happens."""
        while not self.over and (step is None or self.training.steps < step):
            time = min(until, self._timers.next, self._wake)
            if self._phase == "training":
                self.training.stop = min(self._boundary or math.inf, step or math.inf)
                if self.training.advance(time):
                    self.now = self.training.at
                    self._has_stopped()
                    continue
            if time == math.inf:
                return
            self.now = time
            if self._timers.next == time:
                self._timers.fire()
            elif self._wake == time:
                self._wake, action = math.inf, self._on_wake
                action()
            else:
                return

    def stop(self) -> None:
        """End the run before its work is done, to account for all nodes."""
        if self._phase == "training":
            self._interrupt(None)
        self._close()

    def _wake_at(self, time: float, action: Callable[[], None]) -> None:
        self._wake, self._on_wake = time, action

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _is_ready(self, node: Process) -> None:
        # The timer of a node that has ended meanwhile was not cancelled.
        if self.nodes.get(node.name) is not node or self.over:
            return
        node.ready, node.waiting_since = True, self.now
        self._mark([node], "waiting" if self._phase in ("open", "broken") else "idle")
        if self._phase == "open":
            self._wake_at(self.now, self._try_seal)  # after all that happens now: many nodes are ready at once
        elif self._phase == "training":
            self._look_at_spares()
        elif self._phase == "broken" and not self._survivors:
            self._detect(silent=True)

    def _try_seal(self) -> None:
        """Seal the open round if its first candidate would do so now."""
        number = self._round.number
        rows = [Member(name, name, "left", number) for name in self._lost - self.nodes.keys()]
        rows += [Member(name, name, "waiting" if it.ready else "starting", number) for name, it in self.nodes.items()]
        # What the candidates would see in the table.
        ranked = candidates(self._round, rows)
        self._wake = math.inf
        if ranked and self._seal_timer.is_due(rows, ranked[0].node, self.now):
            self._enter(seal(self._round, rows, self._limits))
        elif ranked:
            self._wake_at(later(self.now, self._seal_timer.next_change), self._try_seal)

    def _enter(self, sealed: Round) -> None:
        """Let the members of a sealed round get ready for its first step."""
        self._round, self._sealed_at, self._phase = sealed, self.now, "entering"
        self._members = [member.node for member in sealed.members]
        self._lost, self._leavers, self._boundary = set(), {}, None
        # A member without the newest state gets it from one that has it. If all of those are lost, the checkpoint is
        # read.
        self._holders &= set(self._members)
        if self._holders:
            seconds = self._parameters.recovery_seconds[self._cause]
        else:
            self.training.roll_back(self._cause)
            restore = self._parameters.restore_seconds if self.training.committed else 0.0
            seconds = self._parameters.first_step_seconds + restore
        members = [self.nodes[name] for name in self._members]
        self._mark([node for node in members if node.entered], "recovering", self._cause)
        self._mark([node for node in members if not node.entered], "starting")
        self._mark(self._spares, "idle")
        self._wake_at(self.now + exact(seconds), self._begin)

    def _begin(self) -> None:
        """Begin the first step of a round."""
        self._phase, self._holders = "training", set(self._members)
        self.rounds += 1
        for node in self._survivors:
            node.entered = True
        self._mark(self._survivors, "training")
        self.training.begin(self.now, len(self._members), self._round.losses, self._round.seconds)
        if self._leavers:
            self._propose_boundary()
        self._look_at_spares()

    def _look_at_spares(self) -> None:
        """Make room for the spares if rank 0's node would do so now, otherwise when it may."""
        since = {node.name: node.waiting_since for node in self._spares}
        if self._phase != "training" or not since or len(self._members) >= self._limits.maximum:
            return
        debounce = self._timings.rescale_debounce.total_seconds()
        if HubView(waiting_since=since).spares(self.now, debounce):
            if not ends_soon(self.training.seconds_left):
                self._propose_boundary()
        elif self._boundary is None:
            self._timers.add(later(max(since.values()), debounce), self._look_at_spares)

    def _propose_boundary(self) -> None:
        self._boundary = self._boundary or self.training.steps + 1

    def _has_stopped(self) -> None:
        """Go on after the last step before a boundary, or the last one of the run."""
        if self.training.done:
            self._end()
        elif self._boundary is not None and self.training.steps >= self._boundary:
            # As on real nodes, which leave only when the state is committed.
            if self._leavers and self.training.committed < self.training.steps:
                self.training.save(must_commit=True)
                return
            cause: Cause = "preemption" if "preemption" in self._leavers.values() else "scale-up"
            self._interrupt(cause)
            self._reopen("rescale at a step boundary", cause)

    def _break(self, name: str, cause: Cause) -> None:
        """Interrupt the round if the node is a member of it."""
        if self._phase not in ("training", "entering", "broken") or name not in self._members:
            return
        node = self.nodes[name]
        if self._phase == "training":
            self._interrupt(cause)
            # Its part of the step in progress, which the survivors train again.
            node.activity = "lost work"
        else:
            self._mark([member for member in self._survivors if member.entered], "recovering", cause)
        self._cause = cause
        self._lost.add(name)
        self._holders.discard(name)

    def _interrupt(self, cause: Cause | None) -> None:
        """Interrupt the training, because the round ends for a cause, or because a node does not go on for now."""
        self.training.interrupt(self.now)
        activity: Activity = "training" if cause is None else "recovering"
        for member in self._survivors:
            member.at, member.activity, member.cause = self.training.at, activity, cause

    def _detect(self, *, silent: bool) -> None:
        """End a broken round when a survivor notices it, or else a spare by the table."""
        timings = self._timings
        if self._survivors:
            seconds = SilenceLimit(timings).shortest if silent else 0.0
        elif self._spares:
            is_refused = not silent and len(self._members) == 1
            seconds = 0.0 if is_refused else 2 * timings.table_heartbeat_interval.total_seconds()
        else:
            seconds = math.inf
        time = self.now + exact(seconds)
        if self._phase == "broken" and self._on_wake == self._reopen_broken and self._survivors:
            time = min(time, self._wake)  # the first loss is detected first
        self._phase = "broken"
        self._wake_at(time, self._reopen_broken)

    def _reopen_broken(self) -> None:
        self._reopen(f"lost {', '.join(sorted(self._lost))}", self._cause)

    def _go_on(self) -> None:
        """Train on after a pause that was too short to be noticed."""
        self._phase = "training"
        self._mark(self._survivors, "training")
        self.training.begin(self.now, len(self._members), self._round.losses, self._round.seconds)

    def _reopen(self, reason: str, cause: Cause) -> None:
        for name in self._leavers.keys() & self.nodes.keys():  # a node that has to go does not take part again
            self.nodes.end(name, self.now)
            self._lost.add(name)
        spares = self._spares
        seconds = self.now - self._sealed_at
        self._round = reopened(self._round, reason, self._lost, [node.name for node in spares], seconds=seconds)
        self._seal_timer = SealTimer(self._round, self._limits, self._timings)
        self._phase, self._cause, self._boundary = "open", cause, None
        self._lost, self._leavers, self._members = set(), {}, []
        self._mark(spares, "waiting")
        self._try_seal()

    def _end(self) -> None:
        self._phase = "ended"
        for node in self._survivors:
            node.at = self.training.at
        self._mark(self.nodes.values(), "idle")
        self._wake_at(self.now + exact(self._parameters.finish_seconds), self._close)

    def _close(self) -> None:
        for name in list(self.nodes):
            self.nodes.end(name, self.now)
        self.over = True

    @property
    def _survivors(self) -> list[Process]:
        return [self.nodes[name] for name in self._members if name in self.nodes and name not in self._lost]

    @property
    def _spares(self) -> list[Process]:
        spares = self.nodes.keys() - (self._members if not self._lost else {*self._members} - self._lost)
        return [node for name, node in self.nodes.items() if name in spares and node.ready] if spares else []

    def _mark(self, nodes: Iterable[Process], activity: Activity, cause: Cause | None = None) -> None:
        self.nodes.mark(nodes, self.now, activity, cause)
