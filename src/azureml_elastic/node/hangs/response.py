"""From the verdict "it hangs" to the end of the round: all nodes write down their workers' stacks first.

Rank 0's agent decides, records it, and broadcasts ``dump``. Every agent collects the stacks of its own workers and
reports ``dumped``. When all have, or after a few seconds, rank 0's agent ends the round. An agent whose own verdict
comes, much later, although rank 0's has not, does so alone: what hangs may be that agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from azureml_elastic.ipc.agent_messages import Dumped, DumpStacks, HangLesson
from azureml_elastic.ledger.events import HangDetected
from azureml_elastic.node.core.hangs import Hang
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.hangs.stack_report import StackReporter
from azureml_elastic.node.io.event_recorder import Recorder

__all__ = ["HangResponse"]

_ANSWER_SECONDS = 5.0
"""For all nodes to collect their stacks; twice what one may take."""


class HangResponse:
    """One agent's part. For the agent's thread.

    Args:
        watch: detector of this node's hanging workers.
        dumper: reporter of their stacks.
        recorder: writer of the ledger.
        node: this node's name.
        broadcast: sends a message to every agent of the round, this one included; used where this node leads.
        send: sends a message to rank 0's agent.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        watch: HangDetector,
        dumper: StackReporter,
        recorder: Recorder,
        node: str,
        *,
        broadcast: Callable[[DumpStacks | HangLesson], None],
        send: Callable[[Dumped], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._dumper = dumper
        self._recorder = recorder
        self._node = node
        self._broadcast = broadcast
        self._send = send
        self._clock = clock
        self.begin(0, ())

    def begin(self, number: int, members: Iterable[str]) -> None:
        """A round begins.

        Args:
            number: number of the round.
            members: names of its nodes in rank order.
        """
        self._number = number
        self._members = tuple(members)
        self._hang: Hang | None = None
        self._mine = False
        self._reported = False
        self._missing: set[str] = set()
        self._until = 0.0
        self._watch.begin()

    @property
    def hung(self) -> bool:
        """Whether this round was found to hang, here or elsewhere: its workers are to be killed, not asked."""
        return self._hang is not None

    def take(self, message: DumpStacks | HangLesson) -> None:
        """Process a broadcast of rank 0's agent."""
        if isinstance(message, HangLesson):
            self._watch.learn(message)
        elif message.round == self._number and self._hang is None:
            hang = Hang(message.step, message.waited, message.limit, message.phase)
            self._watch.fired(hang)
            self._dump(hang)

    def answered(self, node: str) -> None:
        """Record that a node has written its stacks; for rank 0's agent."""
        self._missing.discard(node)

    def look(self) -> Hang | None:
        """Do what is due; to be called several times a second while workers run.

        Returns:
            The hang for which this agent must end the round now. All stacks that can be had are written.
        """
        leads = self._members[:1] == (self._node,)
        if leads and (lesson := self._watch.lesson()) is not None:
            self._broadcast(lesson)
        if self._hang is None and (hang := self._watch.verdict(leads=leads)) is not None:
            self._decide(hang, leads=leads)
        if self._hang is None:
            return None
        if self._dumper.done and not self._reported:
            self._reported = True
            self._missing.discard(self._node)
            if not self._mine:
                self._send(Dumped())
        over = not self._missing or self._clock() >= self._until
        return self._hang if self._mine and over else None

    def _decide(self, hang: Hang, *, leads: bool) -> None:
        self._mine = True
        self._missing = set(self._members) if leads else {self._node}
        self._until = self._clock() + _ANSWER_SECONDS
        self._recorder.record(
            HangDetected, self._number, step=hang.step, seconds=hang.waited, limit_seconds=hang.limit, phase=hang.phase
        )
        self._dump(hang)
        if leads:
            self._broadcast(DumpStacks(self._number, hang.step, hang.waited, hang.limit, hang.phase))

    def _dump(self, hang: Hang) -> None:
        self._hang = hang
        self._dumper.start(hang.reason, self._number, self._watch.steps)
