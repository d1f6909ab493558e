"""Horovod in its elastic mode, fed by the members of the rounds instead of a host discovery script.

Workers stay over the rounds where ``hvd.elastic.run`` lets them:

- A node comes: the workers go on in their old places until the new node's workers have imported everything and wait;
  then they are notified, leave their places at the next commit, and all connect.
- A node is lost: Horovod's operations fail in the others, which restore their last commit and ask for another place.
- A node is preempted: all are notified, leave their places at the next commit, and the others go on without that node.

The protocol between the nodes is in the store of the round: ``name/<node>`` and ``count/<node>`` have each node's
name and number of workers;
``fresh`` counts the nodes whose workers are all new, and ``fresh_waiting`` those of them that wait;
``ready/<generation>`` counts the nodes whose workers wait for the generation, which begins when all do;
``connected/<generation>`` those whose workers have connected; ``leaving`` the nodes that want to leave; ``finished``
those whose workers have ended well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from azureml_elastic.engines.child import Child
from azureml_elastic.engines.engine import RoundStore
from azureml_elastic.engines.horovod.rendezvous import LocalRendezvous, Slot, Status, slots_of
from azureml_elastic.engines.horovod.server import HOST, Notifications, WorkerServer
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.engine import EngineEnvironment
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity

_LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
"""How long the end of a round waits for workers that connect: the keys that they need are in the round's store."""

_POLL_SECONDS = 0.02
_IN_PLACE = (Status.CONNECTING, Status.RUNNING)


@dataclass
class _Round:
    store: RoundStore
    node: int
    nodes: int
    fresh: bool
    """Whether no worker of this node has been in a generation."""
    counts: list[int] | None = None
    names: frozenset[str] = frozenset()
    generation: int = 0
    """Number of the next generation."""
    said: set[str] = field(default_factory=set)
    """Counters to which this node has added."""
    notified: set[str] = field(default_factory=set)
    """Reasons for which the workers have been notified."""

    @property
    def slots(self) -> list[Slot]:
        assert self.counts is not None
        return slots_of(self.node, self.counts)

    def say(self, name: str) -> None:
        """Add this node to a counter, once."""
        if name not in self.said:
            self.said.add(name)
            self.store.add(name, 1)

    def unsay(self, name: str) -> None:
        """Take this node from a counter."""
        if name in self.said:
            self.said.remove(name)
            self.store.add(name, -1)

    def count(self, name: str) -> int:
        """Return a counter."""
        return self.store.add(name, 0)


class HorovodEngine:
    """This node's workers; an engine.

    Args:
        node: name of the node, unique in the run.
    """

    def __init__(self, node: str, count: int, program: Sequence[str], agent: Agent) -> None:
        self._name = node
        self._command = tuple(program)
        self._children: list[Child | None] = [None] * count
        self._notifications = Notifications()
        self._rendezvous = LocalRendezvous(count, self._on_listening)
        self._server = WorkerServer(self._rendezvous, agent)
        self._in_generation = False
        """Whether the present processes have been in a generation, so that they may have a state."""
        self._partners: frozenset[str] = frozenset()
        """Names of the nodes whose workers have connected to this node's."""
        self._round: _Round | None = None

    def enter(self, place: WorkerIdentity, store: RoundStore) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        if all(child is not None and child.exit_code == 0 for child in self._children):
            self._end_workers()  # another node was lost before all had ended, so that the end is trained again
        self._round = round_ = _Round(store, place.rank, place.world_size, fresh=not self._in_generation)
        store.set(f"name/{place.rank}", self._name.encode())
        store.set(f"count/{place.rank}", str(len(self._children)).encode())
        if round_.fresh:
            round_.say("fresh")
        round_.say("entered")

    def poll(self) -> int | None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        round_ = self._round
        assert round_ is not None
        for child in self._children:
            if child is not None and (code := child.exit_code):
                return code
        if not self._all_known(round_):
            return None
        if self._all_ended(round_):
            return 0 if round_.count("finished") == round_.nodes else None
        self._start_missing(round_)
        self._connect(round_)
        self._notify_of_changes(round_)
        return None

    def round_over(self) -> None:
        """Wait for workers that connect, for a short time: they need the store of the round that is over."""
        round_, until = self._round, time.monotonic() + _CONNECT_SECONDS
        while round_ is not None and round_.generation > 0 and time.monotonic() < until:
            statuses = self._rendezvous.statuses()
            if any(child is None or child.exit_code is not None for child in self._children):
                return
            self._say_connected(round_)
            # Rank 0's agent has the store, which is gone when it leaves the round: its node waits for all others.
            if Status.CONNECTING not in statuses and (
                round_.node > 0 or round_.count(f"connected/{round_.generation - 1}") == round_.nodes
            ):
                return
            time.sleep(_POLL_SECONDS)

    def leave(self) -> bool:
        """Have the workers of all nodes leave their places; this node's are done when they have."""
        assert self._round is not None
        self._round.say("leaving")
        self._notify(self._round, "leaving")
        return not any(status in _IN_PLACE for status in self._present())

    def stop(self) -> None:
        """See :class:`~azureml_elastic.engines.engine.Engine`."""
        self._end_workers()
        if self._round is not None:
            self._round = None
            self._rendezvous.close()
            self._server.close()

    # --- steps of poll -----------------------------------------------------------------------------------------------

    def _all_known(self, round_: _Round) -> bool:
        """Return whether all nodes of the round have said how many workers they have."""
        if round_.counts is None and round_.count("entered") == round_.nodes:
            found = [round_.store.get(f"count/{node}") for node in range(round_.nodes)]
            names = (round_.store.get(f"name/{node}") for node in range(round_.nodes))
            round_.names = frozenset((name or b"").decode() for name in names)
            round_.counts = [int(count or b"0") for count in found]
            # Horovod's operations fail at once only where they wait for a lost worker itself. Others, of workers that
            # wait for each other, would fail after its timeout of 30 s: the relay in the workers aborts them.
            if not self._partners <= round_.names and Status.RUNNING in self._rendezvous.statuses():
                self._rendezvous.lose()
                round_.notified.add("changes")  # they leave their places anyway
        return round_.counts is not None

    def _all_ended(self, round_: _Round) -> bool:
        """Return whether this node's workers have ended well, and say so."""
        if round_.fresh and round_.generation == 0 and round_.count("finished") > 0:
            self._end_workers()  # the others have finished without this node
            round_.say("finished")
        elif all(child is not None and child.exit_code == 0 for child in self._children):
            # Others that were in a generation and wait for the next one cannot go on without this node's ranks. New
            # ones, of nodes that came too late, do not count: they end with the run.
            waiting = round_.count(f"ready/{round_.generation}")
            if waiting > (round_.count("fresh_waiting") if round_.generation == 0 else 0):
                _LOG.info("Workers of other nodes cannot finish without this node's, which are started again.")
                self._end_workers()
                round_.unsay("finished")
                return False
            round_.say("finished")
        return "finished" in round_.said

    def _start_missing(self, round_: _Round) -> None:
        """Start the workers that are missing, and again those that wait for a place which they will not get."""
        statuses, slots = self._rendezvous.statuses(), round_.slots
        if not self._in_generation:
            # New workers have their places in their variables, which name the ranks of the round that started them.
            for local_rank, child in enumerate(self._children):
                if child is not None and not self._rendezvous.expects(local_rank, slots[local_rank]):
                    self._end_worker(local_rank)
        elif Status.WAITING not in statuses:
            return
        for local_rank, child in enumerate(self._children):
            if child is None or child.exit_code == 0:
                self._rendezvous.started(local_rank, slots[local_rank])
                self._children[local_rank] = Child(self._command, self._variables(slots[local_rank]))

    def _connect(self, round_: _Round) -> None:
        """Begin the next generation once all workers of the round wait for it."""
        if all(status is Status.WAITING for status in self._rendezvous.statuses()):
            round_.say(f"ready/{round_.generation}")
            if round_.fresh:
                round_.say("fresh_waiting")
            # Not while a worker still aborts its old connections: it aborts all that its process has, also new ones.
            if round_.count(f"ready/{round_.generation}") == round_.nodes and not self._rendezvous.aborting:
                _LOG.info("Horovod connects %d workers of %d nodes.", round_.slots[0].size, round_.nodes)
                self._rendezvous.begin(round_.store, round_.generation, round_.slots)
                self._in_generation, self._partners = True, round_.names
                round_.generation += 1
        self._say_connected(round_)

    def _say_connected(self, round_: _Round) -> None:
        statuses = self._rendezvous.statuses()
        if round_.generation > 0 and all(status is Status.RUNNING for status in statuses):
            round_.say(f"connected/{round_.generation - 1}")

    def _notify_of_changes(self, round_: _Round) -> None:
        """Have the workers leave the places of an earlier round when nobody has to wait for long, or a node leaves."""
        leaving = round_.count("leaving") > 0
        # New workers import for many seconds. To notify before they all wait would stop those that train for as long.
        complete = round_.generation == 0 and round_.count("fresh_waiting") == round_.count("fresh")
        if leaving:
            self._notify(round_, "leaving")
        elif complete and round_.count("finished") == 0:
            self._notify(round_, "changes")

    def _notify(self, round_: _Round, reason: str) -> None:
        if reason not in round_.notified:
            round_.notified.add(reason)
            for local_rank, status in enumerate(self._rendezvous.statuses()):
                child = self._children[local_rank]
                if child is not None and status is Status.RUNNING:
                    self._notifications.notify(local_rank, child)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _present(self) -> list[Status]:
        """Return how far the workers whose processes run have come."""
        running = [child is not None and child.exit_code is None for child in self._children]
        return [status for status, runs in zip(self._rendezvous.statuses(), running, strict=True) if runs]

    def _end_workers(self) -> None:
        for local_rank in range(len(self._children)):
            self._end_worker(local_rank)
        self._in_generation, self._partners = False, frozenset()

    def _end_worker(self, local_rank: int) -> None:
        child, self._children[local_rank] = self._children[local_rank], None
        if child is not None:
            child.stop(timeout=0)
            self._rendezvous.ended(local_rank)

    def _variables(self, slot: Slot) -> dict[str, str]:
        """Return the environment variables of a new worker."""
        environment = EngineEnvironment.read()  # of this round
        interface = environment.gloo_interface
        return {
            **slot.variables(),
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": self._name,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": HOST,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.port),
            **({} if interface is None else {"HOROVOD_GLOO_IFACE": interface}),
            variables.ROUND: environment.round,
            "PYTHONUNBUFFERED": "1",
        }

    def _on_listening(self, local_rank: int, value: bytes, port: int) -> None:
        child = self._children[local_rank]
        if child is not None:
            self._notifications.listens(local_rank, child, value, port)
