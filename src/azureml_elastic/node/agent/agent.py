"""Agent of one node: runs its workers through all rounds of the run, independently of the loss of other nodes.

The agent does without torch, whose import takes longer than everything else on the way to the first step: the preload
server has it. What torch's own agent does through rank 0's store between rendezvous and exit (rank assignment, exit
barrier) is replaced: ranks follow from the sealed round, the end of the run from the hub and the table.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from azureml_elastic.checkpoint.snapshots.handed_over import write_handed_over
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.port import AgentPort
from azureml_elastic.node.agent.worker_group import WorkerGroup
from azureml_elastic.node.core.node import Node
from azureml_elastic.node.core.training import State
from azureml_elastic.node.driver import Driver
from azureml_elastic.node.preemption.watcher import PreemptionWatcher

_LONGEST_SECONDS = 120.0
"""Time limit without a notice: a mount that hangs must not keep the node, and its bill, for ever."""

_POLL_SECONDS = 0.2


def keep_last_state(descriptor: int, state: HandedOverState, preemption: PreemptionWatcher) -> None:
    """Write the state to the run's storage, as no next worker of this node gets it. Never raises.

    What is cut short has no manifest, so it is never restored, and the next checkpoint removes it.

    Args:
        descriptor: descriptor of the state's memory, closed here.
        preemption: watch for notices, whose deadline also counts if it comes meanwhile.
    """
    until = time.monotonic() + _LONGEST_SECONDS

    def seconds_left() -> float:
        return max(0.0, min(until - time.monotonic(), preemption.seconds_left))

    def write() -> None:
        try:
            where = write_handed_over(descriptor, state, seconds_left)
        except Exception as error:  # noqa: BLE001 - the agent ends for another reason, which must be seen
            _LOG.warning("The state of step %d in memory could not be kept: %s", state.step, error)
        else:
            _LOG.warning("The state of step %d in memory is kept in %s for the next start.", state.step, where)
        finally:
            os.close(descriptor)

    # A write to a mount that hangs cannot be ended: the thread ends with the process.
    writer = threading.Thread(target=write, name="last-state", daemon=True)
    writer.start()
    while writer.is_alive() and seconds_left() > 0.0:
        writer.join(_POLL_SECONDS)
    if writer.is_alive():
        _LOG.warning("The state of step %d in memory was not written in time, and is lost.", state.step)


_LOG = logging.getLogger(__name__)


class NodeAgent:
    """Runs this node's workers through all rounds of the run.

    Attributes:
        machine: what decides; knows how this node's part has ended.
    """

    def __init__(
        self, machine: Node, port: AgentPort, group: WorkerGroup, channel: Channel, preemption: PreemptionWatcher
    ) -> None:
        self.machine = machine
        self._port = port
        self._group = group
        self._channel = channel
        self._preemption = preemption

    def take_part(self) -> State:
        """Take part in the run until it ends or this node has to leave.

        Returns:
            How this node's part has ended: succeeded, failed or left.

        Raises:
            RunSucceeded, RunFailed: another node has ended the run, or the workers cannot be started.
            NodeLeaving: this node must leave while it waits for a round.
        """
        driver, machine = Driver(self.machine, self._port), self.machine
        with contextlib.ExitStack() as stack:  # one step after the other, whatever fails
            # The stack is left from its end: the workers end first, who may use the round's store until then.
            stack.callback(self._port.close)
            stack.push(self._end_workers)
            driver.begin()
            driver.turn()
            while machine.ending is None:
                driver.turn(woken=self._port.wait(driver.deadline - self._port.clock()))
            return machine.ending

    def _end_workers(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        """End the workers, and write the state that they hand over where it is to be kept."""
        workers = self._group.workers
        workers.begin_stopping()
        workers.finish_stopping()
        # Only now: workers hand their state over while they are stopped.
        held = self._channel.take_state() if self.machine.keeps_state else None
        if held is not None:
            if error is not None:
                _LOG.warning("This agent ends: %s: %s", type(error).__name__, error)
            keep_last_state(*held, self._preemption)
