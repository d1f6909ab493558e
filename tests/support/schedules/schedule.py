"""A schedule: nodes and faults of a seed, and what must hold.

Safety, whatever happens: the round's row goes on version by version, and no number is sealed twice, unless rows went
back in time. A sealed round has between the minimum and the maximum of nodes, each once, in whole replicas. A node
enters only rounds that the table has held, in its present incarnation, each of them once. No step begins in a round of
which a later one trains with one of its nodes. Failures are charged only where a worker has failed, strikes are counted
only against machines of nodes that a fault concerned. No node makes calls of the table without a pause. The run ends.

After the few faults of most families it is known what must follow, too: for how long training may stand still, how many
rounds there may be, who is charged and struck, from which step a round goes on, who takes part in it, and that the run
ends well, when all workers have.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan, RendezvousTimings
from azureml_elastic.node.core.failures import FailureKind
from azureml_elastic.node.core.round import Limits, Round, whole_replicas
from tests.support.schedules.faults import FAMILIES, Faults
from tests.support.schedules.node import Node
from tests.support.schedules.workers import STEP_SECONDS, Group, Worker
from tests.support.schedules.world import Version, World

_BOUND = 240.0
"""Seconds within which the run must have ended."""

_REFORM = 1.5
"""Seconds from a member's death to the next seal, without another fault."""

_CALLS_A_SECOND = 30


class ViolationError(AssertionError):
    """Something that must hold does not."""


class Schedule:
    """One schedule.

    Args:
        seed: what happens.

    Attributes:
        progress: the furthest step of the round that trains.
        durable: step of the newest checkpoint.
        stays: whether the workers' processes stay over the rounds.
        saves_at_end: whether a program without a session saves when it has to end.
        stuck_until: until when workers complete no step.
        transitions: how often each machine's state has changed, by the state, the event and the next state.
        standstill: the longest time without a step after a fault.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.family = seed, FAMILIES[seed % len(FAMILIES)]
        self.world = world = World(seed)
        self.timings = RendezvousTimings()
        rng, many = world.random, self.family.name == "many"
        # Which nodes hold whole states of several is not simulated.
        size = rng.choice((1, 1, 1, 2)) if many else 1
        alone = self.family.name == "only-member"
        minimum = 1 if alone else rng.choice((1, 1, 2, 2, 3)) * size
        first = 1 if alone else minimum + rng.choice((0, 0, 1, 2) if many else (1, 1, 2))
        most = whole_replicas(max(minimum, first + rng.choice((-1, 0, 0, 1, 2))), size)
        self.limits = Limits(minimum, most, nodes_per_replica=size)
        self.max_restarts = rng.choice((1, 2, 1000))
        self.opens_session = self.family.has_sessions or rng.random() < 0.8
        self.saves_at_end = rng.random() < 0.7
        distribution = ElasticDistribution(
            max_restarts=self.max_restarts, recovery=rng.choice(("restart", "restart", "in_process"))
        )
        self.stays = distribution.keeps_processes(opens_session=self.opens_session)
        self.configuration = Plan(resources=ElasticResources(max_instance_count=most), distribution=distribution)
        self.steps = 100 if many else 60 if self.family.name == "rows-back" else 40
        self.progress = self.durable = 0
        self.stuck_until = self.standstill = 0.0
        self.counts: Counter[str] = Counter()
        self.transitions: Counter[tuple[Enum, str, Enum]] = Counter()
        self.faults = Faults(self)
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._trains: Group | None = None
        self._trained: dict[int, Group] = {}
        self._entered: set[tuple[str, int]] = set()
        self._struck: set[str] = set()
        self._early: set[str] = set()
        self._first: Round | None = None
        self._checked = 0
        self._last_step = 0.0
        self._lost_at: float | None = None
        for number in range(first):
            world.at(rng.uniform(0.0, 3.0 if many else 1.0), lambda number=number: self.add(f"n{number}"))
        self.family.begin(self.faults, rng.uniform(4.0, 10.0))

    def run(self) -> None:
        """Carry the schedule out.

        Raises:
            ViolationError: something that must hold does not.
        """
        while not self._has_ended() and self.world.now < _BOUND:
            self.world.run(self.world.now + 0.5)
            self._check()
        self.require(self._has_ended(), f"has not ended: {self._describe()}")
        self.counts[f"runs {self.world.table.round.state}"] += 1
        self._check_end(self.world.table.round)

    def require(self, holds: object, text: str) -> None:
        """Raise an error that names the seed, unless this holds."""
        if not holds:
            raise ViolationError(f"{self.family.name}, seed {self.seed}, {self.world.now:.3f} s: {text}")

    # --- nodes -------------------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Start a process of a node, unless one runs."""
        if not any(node.name == name and node.alive for node in self.world.nodes) and not self._is_over():
            node = Node(self, name, self.world.random.uniform(0.1, 1.0))
            self.faults.note(node, "comes", node.ready_at, is_fault=False, costs=self._first is not None)
            if self._first is None:
                self._early.add(node.incarnation)

    def living(self) -> list[Node]:
        """Return the nodes whose processes have not ended."""
        return [node for node in self.world.nodes if node.alive]

    def able(self) -> list[Node]:
        """Return the nodes that can take part."""
        return [n for n in self.living() if not n.frozen and n.notice is None and n.ready_at <= self.world.now]

    def expect_seal(self) -> None:
        """A member is lost now, of those that train: the others are to go on at once."""
        self._lost_at = self.world.now

    # --- what nodes tell ---------------------------------------------------------------------------------------------

    def entered(self, node: Node, round_: Round) -> None:
        """A node has entered a round."""
        self.counts["entries"] += 1
        held = any(round_ == version.round for version in self.world.table.versions)
        self.require(held, f"{node} enters a round that the table never held: {round_}")
        self.require(round_.rank_of(node.name, node.incarnation) is not None, f"{node} is not in {round_}")
        key = (node.incarnation, round_.number)
        self.require(key not in self._entered, f"{node} enters round {round_.number} twice")
        self._entered.add(key)

    def moved(self, before: Enum, event: object, after: Enum) -> None:
        """A machine of a node has gone from one state to another."""
        if before is not after:
            self.transitions[before, type(event).__name__, after] += 1

    def struck(self, node: Node, host: str) -> None:
        """A node holds something against a host."""
        self.counts["strikes"] += 1
        self._struck.add(host)
        name = host.removeprefix("host-")
        # What one sends that was late for the table may come after the end of the connection on which it waited.
        late = any(each.name == name and each.waits_for_table for each in self.world.nodes)
        excused = late or host in self.faults.disturbed
        self.require(excused, f"{node} strikes {host}, which nothing has happened to")
        in_order = name in self.faults.leavers and self.family.name in ("notice", "stuck-notice")
        self.require(not in_order, f"{node} strikes {host}, which leaves in order")

    # --- what workers do ---------------------------------------------------------------------------------------------

    def group_of(self, round_: Round) -> Group:
        """Return the workers of a sealed round."""
        key = (round_.number, tuple(member.incarnation for member in round_.members))
        return self._groups.setdefault(key, Group(self, round_))

    def start_of(self, group: Group) -> int:
        """Return the step from which a round goes on: the newest that a member holds in memory, or a checkpoint."""
        members = {member.incarnation for member in group.round.members}
        held = [node.held for node in self.living() if node.incarnation in members and self.opens_session]
        step = max([*held, self.durable])
        if step < self.progress:
            holders = [node for node in self.able() if node.held >= self.progress and node.incarnation not in members]
            # One who waits for the table is not waited for: its next row comes late, too.
            holders = [node for node in holders if not node.waits_for_table]
            # A member counts as lost with its connection, and with it the step that perhaps it alone has completed.
            in_flight = self.family.name == "break" and step == self.progress - 1
            kept = in_flight or self.family.divided or self.limits.nodes_per_replica > 1
            self.require(kept or not holders, f"{holders} hold step {self.progress}, {group} goes on from {step}")
            self.counts["steps trained again"] += self.progress - step
            self.progress = step
            self._trained = {each: by for each, by in self._trained.items() if each <= step}
        return step

    def begins(self, group: Group) -> None:
        """All have given their part to a step of a round."""
        latest, now = self._trains, self.world.now
        if latest is not None and latest.round.number > group.round.number:
            shared = group.workers.keys() & {member.incarnation for member in latest.round.members}
            self.require(not shared, f"a step of {group} after one of {latest}: {sorted(shared)}")
            # Where rows are lost and nobody of a later round lives, a new run begins.
            if any(each.node.alive for each in latest.workers.values()):
                return
        # Beside an emptied table a new node may begin anew until the next heartbeat.
        if (
            latest not in (None, group)
            and not latest.broken
            and not self.family.divided
            and not self.world.table.emptied
        ):
            both = now - latest.stepped < 2 * STEP_SECONDS and all(each.running for each in latest.workers.values())
            self.require(not both, f"{latest} and {group} train at the same time")
        self._trains = group

    def completed(self, group: Group, worker: Worker) -> None:
        """A worker has completed a step."""
        if self._trains is not group:
            return
        self._last_step = self.world.now
        if worker.step > self.progress:
            self.progress = worker.step
            self.counts["steps"] += 1
        before = self._trained.setdefault(worker.step, group)
        excused = self.family.divided or self.world.table.emptied
        self.require(before is group or excused, f"step {worker.step} of {before} is trained again in {group}")

    def saved(self, step: int) -> None:
        """A checkpoint is committed."""
        self.durable = max(self.durable, step)

    def hands_over(self, worker: Worker) -> None:
        """A worker gives its state to the agent of its node."""
        worker.node.held = max(worker.node.held, worker.step)

    def interrupted(self, group: Group, worker: Worker) -> None:
        """A worker is to end."""
        # What a fault costs shows some seconds later.
        calm = not (self.family.mixed or self.family.divided) and self.faults.last_fault + 5.0 < group.saves_since
        saves = worker.saving and self.opens_session
        self.require(not (calm and saves), f"{group} ends while {worker.node} saves at the boundary")

    def ends_without(self, worker: Worker) -> FailureKind:
        """Return how a worker fails because another one is gone."""
        # Some programs end by an error of their own. It is explained where the loss is known at once.
        by_itself = self.family.name == "kill" and self.world.random.random() < 0.5
        return "exit" if by_itself and worker.node is not None else "peer"

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        row = self.world.table.round
        return row is not None and row.closed

    def _has_ended(self) -> bool:
        return self._is_over() and all(node.frozen for node in self.living())

    def _check(self) -> None:
        table = self.world.table
        if not self._checked and table.versions:
            self._check_version(Round(), table.versions[0])
        for index in range(max(1, self._checked), len(table.versions)):
            self._check_version(table.versions[index - 1].round, table.versions[index])
        self._checked = len(table.versions)
        for node in self.living():
            recent = node.calls[-_CALLS_A_SECOND:]
            spins = len(recent) == _CALLS_A_SECOND and recent[-1] - recent[0] < 1.0
            self.require(not spins, f"{node} makes {_CALLS_A_SECOND} calls in a second")
        self._check_progress()

    def _check_progress(self) -> None:
        """Training does not stand still, costs no more rounds than faults do, and leaves nobody out."""
        now, row, faults = self.world.now, self.world.table.round, self.faults
        able = self.able()
        if self._is_over():
            return
        if len(able) < self.limits.minimum:
            self._last_step = now
        waits = now - max(self._last_step, faults.last)
        self.standstill = max(self.standstill, waits)
        what = f"no step and no end for {waits:.1f} s: {self._describe()}"
        self.require(waits <= self.family.standstill, what)
        sealed = sum(1 for each in self.world.table.versions if each.round.state == "sealed")
        # The first round waits for those whose rows it has read, which are not all that come before it is sealed.
        late = len(self._early - {member.incarnation for member in self._first.members}) if self._first else 0
        each = self.family.rounds
        within = each is None or sealed <= 1 + late + faults.count * each
        self.require(within, f"{sealed} rounds after {faults.count} faults and {late} late nodes")
        if row is not None and row.state == "sealed" and now - faults.last > max(8.0, self.family.standstill):
            inside = {member.incarnation for member in row.members}
            outside = [node for node in able if node.incarnation not in inside]
            has_room = len(row.members) < self.limits.maximum and self.progress < self.steps - 12
            self.require(not (outside and has_room), f"{outside} stay outside of round {row.number}")

    def _check_version(self, before: Round, version: Version) -> None:
        row = version.round
        self.counts[row.state] += 1
        names = [member.node for member in row.members]
        self.require(len(names) == len(set(names)), f"a member twice: {row}")
        was, charged = _charged(before), _charged(row)
        failed = self.faults.failed_workers
        self.require(charged <= failed, f"{charged} charged, {failed} have failed: {row}")
        if not self.world.table.went_back:
            self.require(row.is_newer_than(before), f"{before} is followed by {row}")
            self.require(row.closed or was <= charged, f"{was} charged in round {before.number}, {charged} in the next")
            if row.state == "sealed":
                self.require((before.state, before.number) == ("open", row.number), f"sealed over {before}: {row}")
        if row.state == "sealed":
            self._first = self._first or row
            within = self.limits.minimum <= len(names) <= self.limits.maximum
            self.require(within, f"{len(names)} members")
            whole = whole_replicas(len(names), self.limits.nodes_per_replica)
            self.require(whole == len(names), f"{len(names)} members are no whole replicas")
            if self._lost_at is not None:
                took, self._lost_at = version.when - self._lost_at, None
                self.counts["lost members replaced"] += 1
                self.require(took < _REFORM, f"the survivors go on after {took:.2f} s")
        if row.state == "succeeded" and before.state == "sealed" and not self.world.table.went_back:
            runs = [each.node for each in self.group_of(before).workers.values() if each.running and not each.exited]
            self.require(not runs, f"the run has succeeded while workers of {runs} run")

    def _check_end(self, row: Round) -> None:
        """The run has ended as it had to, and so has each node; exactly what has failed is charged and struck."""
        faults = self.faults
        charged = max(_charged(version.round) for version in self.world.table.versions)
        may_fail = faults.failed_workers > self.max_restarts
        self.require(row.state == "succeeded" or may_fail, f"the run has failed: {row}")
        if self.family.charges:
            fails = charged > self.max_restarts
            self.require((row.state == "failed") == fails, f"{charged} of {self.max_restarts} failures: {row}")
            # One that meets the end of a round for a newcomer is explained by that.
            least = faults.failed_workers - (len(self.world.nodes) > len(self._first.members))
            self.require(charged >= least, f"{charged} charged, {faults.failed_workers} have failed")
        if row.state == "succeeded":
            furthest = max(group.step for group in self._groups.values())
            self.require(furthest >= self.steps, f"succeeded at step {furthest} of {self.steps}")
        if self.family.name in ("kill", "silent"):
            gone = {f"host-{node.name}" for node in self.world.nodes if not node.alive and node.part is None}
            self.require(self._struck <= gone, f"strikes against {self._struck}, lost {gone}")
        for node in self.world.nodes:
            wrong = node.part in ("succeeded", "failed") and node.part != row.state
            self.require(not wrong, f"{node} ended as {node.part}, the run as {row.state}")

    def _describe(self) -> str:
        nodes = [
            f"{node}: {node.joiner.state.value if node.joiner else node.training.state.value if node.training else '-'}"
            for node in self.living()
        ]
        row = self.world.table.round or Round()
        members = [member.incarnation for member in row.members]
        return f"round {row.number} {row.state} of {members}; {nodes}, step {self.progress} of {self.steps}"


def _charged(round_: Round) -> int:
    return sum(record.charge for record in round_.failures)
