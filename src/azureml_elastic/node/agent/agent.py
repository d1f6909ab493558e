"""Agent of one node: runs its workers through all rounds of the run, independently of the loss of other nodes.

The agent does without torch, whose import takes longer than everything else on the way to the first step: the preload
server has it. What torch's own agent does through rank 0's store between rendezvous and exit (rank assignment, exit
barrier) is replaced: ranks follow from the sealed round, the end of the run from the hub and the table.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import threading
import time

from azureml_elastic.checkpoint.snapshots.handed_over import write_handed_over
from azureml_elastic.errors import RunSucceeded
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.ledger.events import NodeReady, RoundEntered, WorkersStarted
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.round_runner import RoundRunner
from azureml_elastic.node.agent.worker_group import WorkerGroup
from azureml_elastic.node.core.actions import Close
from azureml_elastic.node.core.training import State
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.store_process import RoundStore, StoreProcess
from azureml_elastic.node.table import Table
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer
from azureml_elastic.plurals import counted

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

_ANNOUNCEMENT_SECONDS = 1.0
"""How long a node whose workers make their imports themselves waits for the announcements of others."""


class NodeAgent:
    """Runs this node's workers through all rounds of the run.

    Attributes:
        closed: the end of the run, where this node's worker has ended it.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        rendezvous: Rendezvous,
        group: WorkerGroup,
        channel: Channel,
        table: Table,
        preemption: PreemptionWatcher,
        runner: RoundRunner,
    ) -> None:
        self._run_id = identity.run_id
        self._resources = identity.plan.resources
        self._distribution = identity.plan.distribution
        self._rdzv = rendezvous
        self._group = group
        self._workers = group.workers
        self._channel = channel
        self._table = table
        self._preemption = preemption
        self._runner = runner
        self._store = RoundStore()
        self._ending: State | None = None
        self.closed: Close | None = None

    def take_part(self) -> State:
        """Take part in the run until it ends or this node has to leave.

        Returns:
            How this node's part has ended: succeeded, failed or left.

        Raises:
            RunSucceeded, RunFailed: another node has ended the run, or the workers cannot be started.
            NodeLeaving: this node must leave while it waits for a round.
        """
        with contextlib.ExitStack() as stack:  # one step after the other, whatever fails
            # The stack is left from its end: the workers end first, who may use the round's store until then.
            stack.callback(self._close_store)
            stack.push(self._end_workers)
            self._get_ready_to_join()
            self._runner.record(NodeReady)
            while True:
                if self._group.stays:
                    self._group.get_ready()
                elif self._workers.importing:  # the others do not wait for this node
                    self._group.warm_up(settle=False)
                self._enter_round()
                training = self._runner.run(self._store)
                if training.state is not State.RECOVERING:
                    self._ending, self.closed = training.state, training.closed
                    return training.state

    def _close_store(self) -> None:
        self._store.close()

    def _end_workers(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """End the workers. Whatever ends this agent may end those of all nodes: the last one to hold a state writes it.

        Nobody needs it where the run has ended well, or where the workers have saved at an agreed step boundary.
        """
        saved = self._ending is State.LEFT and self._group.all(self._channel.workers.report().stopped)
        last = self._ending is not State.SUCCEEDED and not saved and kind is not RunSucceeded
        self._workers.begin_stopping()
        self._workers.finish_stopping()
        # Only now: workers hand their state over while they are stopped.
        held = self._channel.take_state() if last else None
        if held is not None:
            if error is not None:
                _LOG.warning("This agent ends: %s: %s", type(error).__name__, error)
            keep_last_state(*held, self._preemption)

    def _get_ready_to_join(self) -> None:
        """Wait until this node's workers could start, or for a while."""
        round_ = self._rdzv.read_round()
        if round_.number > 1 or round_.state == "sealed":
            self._group.warm_up(settle=round_.state == "sealed")
        elif self._resources.max_instance_count > 1:
            # A round that is sealed before its workers can start begins no earlier, but without the nodes that come a
            # moment later: each of them has announced itself by then, and the first round waits for these.
            if self._workers.is_preloaded:
                self._group.warm_up(settle=False)
            else:
                self._rdzv.wake.wait(_ANNOUNCEMENT_SECONDS)

    def _enter_round(self) -> None:
        """Take a place in the next round, and give the workers theirs."""
        assignment = self._rdzv.join()
        store = RoundStore()
        if assignment.listener is not None:
            store = StoreProcess(assignment, self._workers.preload_server, self._rdzv.wake)
        # Closed at the end: the workers of the round before may have used its store until they were interrupted.
        before, self._store = self._store, store
        round_ = assignment.round
        self._runner.enter(assignment)
        pointer = None
        if assignment.rank == 0:
            pointer = CheckpointPointer(self._table, round_.number, self._rdzv.incarnation)
        names = tuple(member.node for member in round_.members)
        self._runner.record(RoundEntered, rank=assignment.rank, members=names, world_size=round_.world_size)
        nodes, workers = counted(len(names), "node"), counted(round_.world_size, "worker")
        _LOG.info("Round %d: rank %d of %s, %s.", round_.number, assignment.rank, nodes, workers)
        run_key, key = self._rdzv.authenticator.key, b""
        if (
            run_key is not None and self._distribution.runs_engine
        ):  # for its own connections; it does not reveal the run's
            key = hmac.digest(run_key, b"azureml-elastic engine", "sha256")
        self._group.enter(assignment, pointer, self._run_id, self._distribution.max_restarts, key)
        before.close()
        self._runner.record(WorkersStarted, pids=self._workers.pids)
