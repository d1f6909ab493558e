"""A schedule: nodes and faults of a seed, and what must hold whatever happens.

Safety, at any moment: the round's row goes on version by version, and no number is sealed twice, unless rows went
back in time. A sealed round has between the minimum and the maximum of nodes, each once, in whole replicas. A node
enters only rounds that the table has held, in its present incarnation, each of them once. No step begins in a round of
which a later one trains with one of its nodes. Failures are charged only where a worker has failed, strikes are counted
only against machines of nodes that a fault concerned.

Liveness: when faults have stopped, the run ends well, within a time. No node makes calls of the table without a pause.
A member's loss, without another fault, is followed by the next seal within a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from enum import Enum

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan, RendezvousTimings
from azureml_elastic.node.core import training_events as ev
from azureml_elastic.node.core.replicas import whole_replicas
from azureml_elastic.node.core.round import Limits, Round
from tests.support.schedules.node import Node
from tests.support.schedules.workers import Group
from tests.support.schedules.world import World

__all__ = ["Schedule", "ViolationError"]

_QUIET = 40.0
"""Moment after which nothing fails any more."""

_FOR_EVER = 1e6

_BOUND = 200.0
"""Seconds after that in which the run must have ended."""

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
        transitions: how often each machine's state has changed, by the state, the event and the next state.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = world = World(seed)
        self.timings = RendezvousTimings()
        rng = world.random
        # Of a generator of its own: other schedules are what they were.
        size = random.Random(f"nodes of a replica, {seed}").choice((1, 1, 1, 2))
        minimum = rng.choice((1, 2, 2, 3)) * size
        first = minimum + rng.choice((0, 0, 1, 2))
        most = whole_replicas(max(minimum, first + rng.choice((-1, 0, 0, 1, 2))), size)
        self.limits = Limits(minimum, most, nodes_per_replica=size)
        self.max_restarts = rng.choice((1, 1000))
        self.configuration = Plan(
            resources=ElasticResources(max_instance_count=most),
            distribution=ElasticDistribution(max_restarts=self.max_restarts),
        )
        self.steps = rng.choice((20, 60, 120))
        self.progress = 0
        self.counts: Counter[str] = Counter()
        self.transitions: Counter[tuple[Enum, str, Enum]] = Counter()
        self.failed_workers = 0
        self.killed_at: float | None = None
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._trains: Group | None = None
        self._disturbed: set[str] = set()
        self._entered: set[tuple[str, int]] = set()
        self._checked = 0
        self._deadlines: list[tuple[Node, float]] = []
        for number in range(first):
            world.at(rng.uniform(0.0, 3.0), lambda number=number: self.add(f"n{number}"))
        kind = rng.random()
        if kind < 0.15:
            world.at(rng.uniform(5.0, 25.0), self._kill_one_member)
        elif kind > 0.25:
            self._plan(first, rolls_back=kind > 0.85)
        world.at(_QUIET, self._provide_the_minimum)

    def run(self) -> None:
        """Carry the schedule out.

        Raises:
            ViolationError: something that must hold does not.
        """
        world = self.world
        while not self._has_ended() and world.now < _QUIET + _BOUND:
            world.run(world.now + 0.5)
            self._check()
        self.require(self._has_ended(), f"has not ended: {self._describe()}")
        state = world.table.round.state
        self.counts[f"runs {state}"] += 1
        may_fail = self.failed_workers > self.max_restarts
        self.require(state == "succeeded" or may_fail, f"the run has failed: {world.table.round}")

    def require(self, holds: bool, text: str) -> None:
        """Raise an error that names the seed, unless this holds."""
        if not holds:
            raise ViolationError(f"seed {self.seed}, {self.world.now:.3f} s: {text}")

    # --- nodes and faults --------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Start a process of a node, unless one runs."""
        if not any(node.name == name and node.alive for node in self.world.nodes) and not self._is_over():
            Node(self, name, self.world.random.uniform(0.1, 2.0))

    def _plan(self, first: int, *, rolls_back: bool) -> None:
        rng, world = self.world.random, self.world
        for number in range(rng.choice((0, 1, 2, 3))):
            world.at(rng.uniform(2.0, _QUIET), lambda number=number: self.add(f"n{first + number}"))
        faults: list[Callable[[], None]] = [
            self._kill, self._kill, self._return, self._freeze, self._freeze, self._break, self._hole, self._notice,
            self._notice, self._fail_worker,
        ]  # fmt: skip
        for _ in range(rng.choice((1, 2, 4, 8, 14))):
            world.at(rng.uniform(0.5, _QUIET - 1), rng.choice(faults))
        if rng.random() < 0.3:  # several at nearly the same moment
            when = rng.uniform(1.0, _QUIET - 2)
            for _ in range(3):
                world.at(when + rng.uniform(0.0, 0.6), rng.choice(faults))
        for _ in range(rng.choice((0, 0, 1))):
            begins = rng.uniform(0.0, _QUIET - 9)
            world.outages.append((begins, begins + rng.choice((0.5, 2.0, 8.0))))
        if rolls_back:
            world.at(rng.uniform(3.0, _QUIET - 1), self._roll_back)

    def _living(self) -> list[Node]:
        return [node for node in self.world.nodes if node.alive]

    def _pick(self) -> Node | None:
        living = self._living()
        return self.world.random.choice(living) if living else None

    def _kill(self) -> None:
        if (node := self._pick()) is not None:
            self._disturb(node)
            node.kill(silently=self.world.random.random() < 0.3)

    def _return(self) -> None:
        """A process dies, and one of the same name begins soon after."""
        if (node := self._pick()) is not None:
            self._disturb(node)
            node.kill()
            self.world.after(self.world.random.uniform(0.01, 2.0), lambda: self.add(node.name))

    def _kill_one_member(self) -> None:
        """The only fault of a schedule: a member is lost, and the others are enough."""
        training = [node for node in self._living() if node.training is not None]
        if (
            len(training) > self.limits.minimum
            and self.limits.nodes_per_replica == 1
            and len(training) == len(self._living())
        ):
            self.killed_at = self.world.now
            node = self.world.random.choice(training)
            self._disturb(node)
            node.kill()

    def _freeze(self) -> None:
        if (node := self._pick()) is not None and not node.frozen:
            self._disturb(node)
            seconds = self.world.random.choice((0.5, 2.5, 3.5, 6.0, 12.0, _FOR_EVER))
            self.world.log(node, f"is frozen for {seconds:g} s")
            node.freeze(seconds)

    def _break(self) -> None:
        links = [link for node in self._living() for link in node.links.values()]
        if links:
            link = self.world.random.choice(links)
            self._disturb(link.client)
            self._disturb(link.server)
            link.drop()
            link.server.hub_link_ended(link)

    def _hole(self) -> None:
        """Nothing passes between two nodes for some time."""
        living = self._living()
        if len(living) > 1:
            one, other = self.world.random.sample(living, 2)
            self._disturb(one)
            self._disturb(other)
            until = self.world.now + self.world.random.uniform(1.0, 20.0)
            self.world.holes[frozenset((one.name, other.name))] = until

    def _notice(self) -> None:
        node = self._pick()
        if node is None or node.notice is not None:
            return
        seconds = self.world.random.choice((6.0, 12.0, 25.0))
        node.notice = ev.Noticed(node.clock + seconds)
        self.world.log(node, f"must leave in {seconds} s")
        self.world.after(seconds + 5.0, lambda: self._evict(node))
        node.when_running(node.wake)

    def _evict(self, node: Node) -> None:
        if node.alive:
            self.counts["evicted"] += 1
            self._disturb(node)
            node.kill()

    def _disturb(self, node: Node) -> None:
        """A fault concerns this node, so that others may hold something against its machine."""
        self._disturbed.add(f"host-{node.name}")

    def _fail_worker(self) -> None:
        members = [node for node in self._living() if node.training is not None and node.group is not None]
        if members:
            self.failed_workers += 1
            node = self.world.random.choice(members)
            self._disturb(node)
            node.group.fail(node, self.world.random.choice(("user", "killed")))

    def _roll_back(self) -> None:
        self.counts["rows went back"] += 1
        self.world.log("table", "goes back")
        self.world.table.go_back(self.world.random.randint(1, 4))

    def _provide_the_minimum(self) -> None:
        for number in range(self.limits.minimum):
            self.add(f"z{number}")

    # --- what nodes tell ---------------------------------------------------------------------------------------------

    def entered(self, node: Node, round_: Round) -> None:
        """A node has entered a round."""
        self.counts["entries"] += 1
        held = any(round_ == version for _, _, version in self.world.table.versions)
        self.require(held, f"{node} enters a round that the table never held: {round_}")
        self.require(round_.rank_of(node.name, node.incarnation) is not None, f"{node} is not in {round_}")
        key = (node.incarnation, round_.number)
        self.require(key not in self._entered, f"{node} enters round {round_.number} twice")
        self._entered.add(key)

    def group_of(self, round_: Round) -> Group:
        """Return the workers of a sealed round."""
        key = (round_.number, tuple(member.incarnation for member in round_.members))
        return self._groups.setdefault(key, Group(self, round_))

    def begins(self, group: Group) -> None:
        """A step begins in a round."""
        mine = {member.incarnation for member in group.round.members}
        latest = self._trains
        if latest is not None and latest.round.number > group.round.number:
            shared = mine & {member.incarnation for member in latest.round.members}
            self.require(
                not shared, f"a step of round {group.round.number} after one of {latest.round.number}: {shared}"
            )
            return
        self._trains = group

    def completed(self, group: Group) -> None:
        """A step of a round is completed."""
        if self._trains is group:
            self.progress = max(self.progress, group.step)
        self.counts["steps"] += 1

    def moved(self, before: Enum, event: object, after: Enum) -> None:
        """A machine of a node has gone from one state to another."""
        if before is not after:
            self.transitions[before, type(event).__name__, after] += 1

    def struck(self, node: Node, host: str) -> None:
        """A node holds something against a host."""
        self.counts["strikes"] += 1
        self.require(host in self._disturbed, f"{node} strikes {host}, which nothing has happened to")

    # --- invariants --------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        row = self.world.table.round
        return row is not None and row.closed

    def _has_ended(self) -> bool:
        return self._is_over() and all(node.frozen for node in self._living())

    def _check(self) -> None:
        table = self.world.table
        for index in range(max(1, self._checked), len(table.versions)):
            (_, _, before), (when, _, row) = table.versions[index - 1 : index + 1]
            self._check_version(before, row, when)
        if not self._checked and table.versions:
            self._check_version(Round(), table.versions[0][2], table.versions[0][0])
        self._checked = len(table.versions)
        for node in self._living():
            recent = node.calls[-_CALLS_A_SECOND:]
            spins = len(recent) == _CALLS_A_SECOND and recent[-1] - recent[0] < 1.0
            self.require(not spins, f"{node} makes {_CALLS_A_SECOND} calls in a second")

    def _check_version(self, before: Round, row: Round, when: float) -> None:
        self.counts[row.state] += 1
        names = [member.node for member in row.members]
        self.require(len(names) == len(set(names)), f"a member twice: {row}")
        charged = sum(record.charge for record in row.failures)
        self.require(charged <= self.failed_workers, f"{charged} charged, {self.failed_workers} have failed: {row}")
        if not self.world.table.went_back:
            self.require(row.is_newer_than(before), f"{before} is followed by {row}")
            if row.state == "sealed":
                self.require((before.state, before.number) == ("open", row.number), f"sealed over {before}: {row}")
        if row.state == "sealed":
            within = self.limits.minimum <= len(names) <= self.limits.maximum
            self.require(within, f"{len(names)} members")
            whole = whole_replicas(len(names), self.limits.nodes_per_replica)
            self.require(whole == len(names), f"{len(names)} members are no whole replicas")
            if self.killed_at is not None:
                took, self.killed_at = when - self.killed_at, None
                self.counts["lost members replaced"] += 1
                self.require(took < _REFORM, f"the survivors go on after {took:.2f} s")

    def _describe(self) -> str:
        nodes = [
            f"{node}: {node.joiner.state.value if node.joiner else node.training.state.value if node.training else '-'}"
            for node in self._living()
        ]
        return f"{self.world.table.round} {nodes}, step {self.progress} of {self.steps}"
