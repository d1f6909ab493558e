"""What happens to the nodes of a schedule: families of one or two faults, so that one knows what must follow.

One family, :func:`many`, mixes up to 17 faults in 40 s. What follows of them is not known, but nothing may crash, and
the run has to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.failures import FailureKind
from azureml_elastic.node.core.training import State

if TYPE_CHECKING:
    from tests.support.schedules.node import Node
    from tests.support.schedules.schedule import Schedule

_QUIET = 40.0
"""Moment after which none of many faults comes any more."""

_FOR_EVER = 1e6

_CRASH_BEFORE = (
    "Enter", "Take", "Forward", "WriteRound", "Reopen", "Close", "PrepareRow", "Connect", "ToMembers", "ToLeader",
    "TellWorkers", "ReportDone", "InterruptWorkers", "StopWorkers", "Disconnect", "WriteRow", "ReadFailures",
    "AskWorkers", "FlushProgress",
)  # fmt: skip


class Faults:
    """The faults of one schedule.

    Args:
        schedule: that they are a part of.

    Attributes:
        count: number of faults and arrivals that may cost a round.
        last: moment of the last one; of one that lasts, its end.
        last_fault: the same without arrivals and notices.
        disturbed: hosts that a fault concerned, so that others may hold something against them.
        leavers: nodes that had a notice.
        failed_workers: number of workers that failed by themselves.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.world = schedule, schedule.world
        self.count = self.failed_workers = 0
        self.last = self.last_fault = 0.0
        self.disturbed: set[str] = set()
        self.leavers: set[str] = set()
        self._crash: tuple[str, int] | None = None

    def note(
        self, node: Node | None, what: str, until: float = 0.0, *, is_fault: bool = True, costs: bool = True
    ) -> None:
        """Record a fault, or an arrival, which has an effect until a moment; ``costs``: it may cost a round."""
        self.count += costs
        until = max(self.world.now, until)
        self.last = max(self.last, until)
        if is_fault:
            self.last_fault = max(self.last_fault, until)
            if node is not None:
                self.disturb(node)
        self.world.log(node or "world", what)

    def disturb(self, node: Node) -> None:
        """A fault concerns this node."""
        self.disturbed.add(f"host-{node.name}")

    # --- who ---------------------------------------------------------------------------------------------------------

    def _may_be_missing(self) -> Node | None:
        """Return one that can take part, if there are enough of them; rarely another one."""
        able = self.schedule.able()
        spare = len(able) > self.schedule.limits.minimum or (able and self.world.random.random() < 0.2)
        return self.world.random.choice(able) if spare else None

    def _trains(self, node: Node) -> bool:
        group = node.group
        worker = group.workers.get(node.incarnation) if group is not None else None
        return (
            node.training is not None
            and group is not None
            and group.connecting
            and not group.broken
            and worker is not None
            and worker.running
            and worker.step < self.schedule.steps
        )

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Have something happen within some time."""
        self.world.after(self.world.random.uniform(0.0, seconds), what)

    # --- one fault ---------------------------------------------------------------------------------------------------

    def kill(self, node: Node | None = None, *, silently: bool = False) -> None:
        """A node is lost, perhaps one without which there are too few; then others come."""
        node = node or self._may_be_missing()
        if node is None or not node.alive:
            return
        self.note(node, "is killed", costs=not self._is_done(node))
        node.kill(silently=silently)
        self.world.after(3.0, self._fill_up)

    def _is_done(self, node: Node) -> bool:
        """Return whether nobody needs this node any more: its workers have ended well, and rank 0's node knows it."""
        if node.training is None or node.training.leads:
            return False
        first = self.world.node_at(node.round.members[0])
        return first is not None and (node.round.number, node.name) in first.done

    def _fill_up(self) -> None:
        for number in range(self.schedule.limits.minimum - len(self.schedule.able())):
            self.schedule.add(f"z{number}")

    def loss(self, _: float) -> None:
        """A member is lost, perhaps soon after the round has begun, and the others are enough."""

        def lose() -> None:
            living, limits = self.schedule.living(), self.schedule.limits
            if len(living) > limits.minimum and all(self._trains(node) for node in living):
                self.schedule.expect_seal()
                self.kill(self.world.random.choice(living))

        self.world.at(self.world.random.uniform(1.5, 9.0), lose)

    def kill_beside_a_failure(self) -> None:
        """A program ends by an error of its own just before it is known that a node is lost."""
        node = self._may_be_missing()
        if node is None:
            return
        self.world.late = 0.0  # in half a second the loss has to be known
        self.note(node, "is killed")
        others = [each for each in self.schedule.able() if each is not node and self._trains(each)]
        if others and self._trains(node) and self.world.random.random() < 0.4:
            other = self.world.random.choice(others)
            other.group.fail(other, "exit")
            self.world.after(0.2, lambda: node.alive and node.kill())
        else:
            node.kill()
        self.world.after(3.0, self._fill_up)

    def kill_silently(self) -> None:
        """A machine loses power."""
        self.kill(silently=True)

    def freeze(self, *choices: float) -> None:
        """A process stops for some time, and returns."""
        node = self._may_be_missing()
        if node is not None and not node.frozen:
            seconds = self.world.random.choice(choices)
            ends = self.world.now + seconds if seconds < _FOR_EVER else 0.0
            self.note(node, f"is frozen for {seconds:g} s", ends)
            node.freeze(seconds)
            self.world.after(3.0, self._fill_up)

    def notice(self, stuck: float = 0.0) -> None:
        """A node must leave.

        Args:
            stuck: share of the notices after which workers come to no boundary.
        """
        node, world = self._may_be_missing(), self.world
        if node is None or node.notice is not None or node.frozen:
            return
        seconds = world.random.choice((6.0, 12.0, 25.0))
        node.notice = ev.Noticed(node.now + seconds)
        self.leavers.add(node.name)
        until = 0.0
        if world.random.random() < stuck:
            self.schedule.stuck_until = until = world.now + seconds + 3.0
        self.note(node, f"must leave in {seconds:g} s", until, is_fault=False)
        node.when_running(node.wake)
        world.after(seconds + 1.0, lambda: self._must_be_gone(node))

    def _must_be_gone(self, node: Node) -> None:
        if node.alive:
            excused = self.schedule.family.mixed or node.frozen
            self.schedule.require(excused, f"{node} is still there a second after the end of its notice")
            self.note(node, "is evicted")
            node.kill()

    def fail_worker(self, kind: FailureKind) -> None:
        """A worker fails by itself."""
        trains = [node for node in self.schedule.living() if self._trains(node) and not node.frozen]
        if trains:
            node = self.world.random.choice(trains)
            self.failed_workers += 1
            self.note(node, f"its worker fails: {kind}")
            node.group.fail(node, kind)

    def break_connection(self) -> None:
        """A connection between two nodes ends."""
        links = [link for node in self.schedule.living() for link in node.links.values() if link.client is not node]
        if links:
            link = self.world.random.choice(links)
            self.note(link.client, "its connection breaks")
            self.disturb(link.server)
            link.drop()
            link.server.hub_link_ended(link)

    def cut(self, *, one_way: bool) -> None:
        """Nothing passes between two nodes for some time, or from one to the other."""
        living = self.schedule.living()
        if len(living) < 2:
            return
        one, other = self.world.random.sample(living, 2)
        until = self.world.now + self.world.random.uniform(1.0, 20.0)
        self.note(one, f"does not reach {other} until {until:.1f}", until)
        self.disturb(other)
        self.world.holes[one.name, other.name] = until
        if not one_way:
            self.world.holes[other.name, one.name] = until

    def _thaw_when_given_up(self, node: Node) -> None:
        """A process runs again just when others end the round without it."""
        others = [each for each in self.schedule.living() if each is not node and each.training is not None]
        if any(each.training.state is State.ENDING for each in others) or not others:
            self.later(0.02, node.thaw)
        elif node.frozen:
            self.world.after(0.002, lambda: self._thaw_when_given_up(node))

    def freeze_until_given_up(self) -> None:
        """A process stops, and runs again just when others end the round without it."""
        node = self._may_be_missing()
        if node is not None and not node.frozen and self._trains(node):
            self.note(node, "is frozen until it is given up", self.world.now + 3.0)
            node.freeze(10.0)
            self._thaw_when_given_up(node)

    def slow_table(self) -> None:
        """The table answers late, or never, perhaps after it has done what it was asked for."""
        self.world.slow_until = self.world.now + self.world.random.uniform(2.0, 15.0)
        self.note(None, "the table is slow", self.world.slow_until + 10.0)
        follows = (self.kill, lambda: self.fail_worker("user"), lambda: self.schedule.add("x0"))
        self.later(2.0, self.world.random.choice(follows))

    def replace(self) -> None:
        """A process dies, and one of the same name begins soon after."""
        node = self._may_be_missing()
        if node is not None:
            self.kill(node)
            self.world.after(self.world.random.uniform(0.01, 2.0), lambda: self.schedule.add(node.name))

    def lose_rows(self) -> None:
        """Rows go back in time, and another fault may follow."""
        self._roll_back()
        self.note(None, "rows go back", self.world.now + 10.0)
        seconds = self.world.random.choice((0.0, 8.0))
        newcomer = lambda: self.schedule.add("x0")  # noqa: E731
        self.later(seconds, self.world.random.choice((self.kill, newcomer, newcomer)))

    def _roll_back(self) -> None:
        self.schedule.counts["rows went back"] += 1
        self.world.table.go_back(self.world.random.randint(1, 4))

    def crashes(self, node: Node, action: object) -> bool:
        """Return whether a process ends before this action."""
        if self._crash is None:
            return False
        kind, left = self._crash
        # The first round forms before; without it, little is left to see.
        if kind != type(action).__name__ or (kind != "Take" and self.world.now < 3.0):
            return False
        self._crash = (kind, left - 1) if left else None
        if not left:
            self.note(node, f"crashes before {kind}")
            self.world.after(3.0, self._fill_up)
        return not left

    # --- families ----------------------------------------------------------------------------------------------------

    def arrivals(self, when: float) -> None:
        for number in range(self.world.random.choice((1, 2))):
            self.world.at(
                when + self.world.random.uniform(0.0, 4.0), lambda number=number: self.schedule.add(f"x{number}")
            )

    def crash_point(self, when: float) -> None:
        self._crash = (self.world.random.choice(_CRASH_BEFORE), self.world.random.choice((0, 0, 1, 2, 3)))
        self.world.at(6.0, lambda: self.schedule.add("x0"))
        if self.world.random.random() < 0.5:
            self.world.at(when, self.notice)

    def closing(self, when: float) -> None:
        """A node is lost when all is computed, or just before it marks the end, or it cannot mark it."""
        kind = self.world.random.random()
        if kind < 0.3:
            self._crash = ("Close", 0)
        elif kind < 0.7:
            self._when_computed(self.world.random.uniform(0.0, 3.0), self.kill)
        else:
            self._when_computed(0.0, self._slow_for_rank_0)

    def _when_computed(self, later: float, what: Callable[[], object]) -> None:
        if self.schedule.progress >= self.schedule.steps:
            self.world.after(later, what)
        else:
            self.world.after(0.05, lambda: self._when_computed(later, what))

    def _slow_for_rank_0(self) -> None:
        row = self.world.table.round
        first = self.world.node_at(row.members[0]) if row is not None and row.state == "sealed" else None
        if first is not None and len(row.members) > 1:
            self.note(first, "waits for the table")
            first.table_slow_until = self.world.now + 20.0

    def at_seal(self, when: float) -> None:
        """A node is lost at the moment in which it becomes a member."""
        self._when_sealed(self.world.random.choice((1, 1, 2)), self.world.random.uniform(0.0, 0.02))
        if self.world.random.random() < 0.5:
            self.world.at(when, self.kill)

    def _when_sealed(self, number: int, later: float) -> None:
        row = self.world.table.round
        if row is not None and row.state == "sealed" and row.number == number:
            members = [each for each in map(self.world.node_at, row.members) if each is not None]
            self.world.after(later, lambda: self.kill(self.world.random.choice(members)) if members else None)
        elif self.world.now < 30.0:
            self.world.after(0.0005, lambda: self._when_sealed(number, later))

    def late_member(self, when: float) -> None:
        """A newcomer waits while a member enters late."""
        self.world.at(when, self.kill)
        self.world.at(when + self.world.random.uniform(0.0, 1.0), lambda: self.schedule.add("x0"))
        self.world.at(when + self.world.random.uniform(0.0, 1.5), lambda: self.freeze(0.3, 1.0, 2.5))

    def leaver_dies(self, when: float) -> None:
        """A node that must leave is lost before it has left."""

        def both() -> None:
            self.notice()
            leaver = next((node for node in self.schedule.living() if node.notice is not None), None)
            if leaver is not None:
                self.later(2.5, lambda: self.kill(leaver))

        self.world.at(when, both)

    def only_member(self, when: float) -> None:
        """The only member stops for ever, without a closed connection, and a newcomer waits beside it."""

        def come() -> None:
            members = [node for node in self.schedule.able() if node.training is not None]
            self.schedule.add("x0")
            if members and self.world.random.random() < 0.7:
                self.world.after(
                    2.0, lambda: (self.note(members[0], "is frozen for ever"), members[0].freeze(_FOR_EVER))
                )

        self.world.at(when, come)

    def failures(self, when: float) -> None:
        """One to three workers fail, and a newcomer may come at that time."""
        rng = self.world.random
        self.world.at(when, lambda: self.fail_worker("user"))
        for _ in range(rng.choice((0, 1, 2))):
            self.world.at(when + rng.uniform(1.5, 4.0), lambda: self.fail_worker("user"))
        if rng.random() < 0.6:
            self.world.at(when + rng.uniform(0.0, 3.0), lambda: self.schedule.add("x0"))

    def rows_back(self, when: float) -> None:
        """Several rounds first, so that the heartbeat of a later one stays."""
        for number in range(self.world.random.choice((0, 1, 2))):
            self.world.at(3.0 + 3.0 * number, lambda number=number: self.schedule.add(f"x{number + 3}"))
        self.world.at(max(when, 9.0), self.lose_rows)

    def rows_back_alone(self, when: float) -> None:
        """Rows go back, and none of those lives that could tell: the heartbeat of a later round is all that is left."""
        rng, table = self.world.random, self.world.table

        def lose() -> None:
            rounds = [index for index, each in enumerate(table.versions) if each.round.state == "open"]
            if not rounds:
                return
            self.schedule.counts["rows went back"] += 1
            table.go_back(len(table.versions) - 1 - rng.choice(rounds))
            self.note(None, "rows go back, and all nodes are lost", self.world.now + 10.0)
            for node in self.schedule.living():
                self.note(node, "is killed")
                node.kill()
            for number in range(self.schedule.limits.minimum):
                self.later(2.0, lambda number=number: self.schedule.add(f"z{number}"))

        for number in range(rng.choice((1, 2))):
            self.world.at(3.0 + 3.0 * number, lambda number=number: self.schedule.add(f"x{number}"))
        self.world.at(max(when, 8.0), lose)

    def two(self, when: float) -> None:
        """Two faults at nearly the same moment."""
        rng = self.world.random
        faults = (
            self.kill, self.kill_silently, self.notice, self.break_connection, self.slow_table, self.replace,
            self.lose_rows, partial(self.freeze, 6.0, 12.0, _FOR_EVER), partial(self.freeze, 0.3, 1.0, 2.5),
            partial(self.fail_worker, "user"), partial(self.fail_worker, "killed"), partial(self.cut, one_way=False),
            partial(self.cut, one_way=True),
        )  # fmt: skip
        for _ in range(2):
            self.world.at(when + rng.uniform(0.0, 1.0), rng.choice(faults))

    def many(self, _: float) -> None:
        """Faults of all kinds, at any time, to any node."""
        rng, world, schedule = self.world.random, self.world, self.schedule
        for number in range(rng.choice((0, 1, 2, 3))):
            world.at(rng.uniform(2.0, _QUIET), lambda number=number: schedule.add(f"x{number}"))
        faults: list[Callable[[], None]] = [
            self._kill_any, self._kill_any, self._replace_any, self._freeze_any, self._freeze_any,
            self.break_connection, lambda: self.cut(one_way=rng.random() < 0.5), self.notice, self.notice,
            lambda: self.fail_worker(rng.choice(("user", "killed"))),
        ]  # fmt: skip
        for _ in range(rng.choice((1, 2, 4, 8, 14))):
            world.at(rng.uniform(0.5, _QUIET - 1), rng.choice(faults))
        if rng.random() < 0.3:
            when = rng.uniform(1.0, _QUIET - 2)
            for _ in range(3):
                world.at(when + rng.uniform(0.0, 0.6), rng.choice(faults))
        for _ in range(rng.choice((0, 0, 1))):
            begins = rng.uniform(0.0, _QUIET - 9)
            world.outages.append((begins, begins + rng.choice((0.5, 2.0, 8.0))))
        if rng.random() < 0.2:
            world.at(rng.uniform(3.0, _QUIET - 1), self._roll_back)
        world.at(_QUIET, lambda: [schedule.add(f"z{number}") for number in range(schedule.limits.minimum)])

    def _any(self) -> Node | None:
        living = self.schedule.living()
        return self.world.random.choice(living) if living else None

    def _kill_any(self) -> None:
        if (node := self._any()) is not None:
            self.note(node, "is killed")
            node.kill(silently=self.world.random.random() < 0.3)

    def _replace_any(self) -> None:
        if (node := self._any()) is not None:
            self.note(node, "is killed")
            node.kill()
            self.world.after(self.world.random.uniform(0.01, 2.0), lambda: self.schedule.add(node.name))

    def _freeze_any(self) -> None:
        if (node := self._any()) is not None and not node.frozen:
            seconds = self.world.random.choice((0.5, 2.5, 3.5, 6.0, 12.0, _FOR_EVER))
            self.note(node, f"is frozen for {seconds:g} s")
            node.freeze(seconds)


@dataclass(frozen=True)
class Family:
    """Faults that come together, and what they may cost.

    Args:
        begin: arranges them; they begin at the moment that it gets.
        standstill: seconds after a fault and the last step within which there is a step, or the end.
        rounds: number of rounds that one fault may cost, ``None`` for any.
        divided: whether nodes may be cut off from each other, so that two rounds may train.
        mixed: whether faults excuse each other's effects.
        charges: whether workers fail by themselves, and exactly they are charged.
        has_sessions: whether all programs of it have a session.
    """

    name: str
    begin: Callable[[Faults, float], None]
    standstill: float
    rounds: int | None
    divided: bool = False
    mixed: bool = False
    charges: bool = False
    has_sessions: bool = False


def _one(fault: Callable[[Faults], object]) -> Callable[[Faults, float], None]:
    return lambda faults, when: faults.world.at(when, lambda: fault(faults))


_MANY = Family("many", Faults.many, float("inf"), None, divided=True, mixed=True)

# The limits are the largest that ten thousand schedules of the unmodified machines needed, and about a second.
FAMILIES = (
    Family("arrivals", Faults.arrivals, 6.0, 1),
    Family("loss", Faults.loss, 5.0, 1),
    Family("kill", _one(Faults.kill_beside_a_failure), 6.0, 2),
    Family("silent", _one(Faults.kill_silently), 8.0, 2),
    Family("frozen", _one(lambda faults: faults.freeze(6.0, 12.0, _FOR_EVER)), 17.0, 2, divided=True),
    Family("freeze-until-given-up", _one(Faults.freeze_until_given_up), 6.0, 2, divided=True),
    Family("brief-freeze", _one(lambda faults: faults.freeze(0.3, 1.0, 2.5)), 6.0, 2),
    Family("notice", _one(Faults.notice), 6.0, 1),
    Family("stuck-notice", _one(lambda faults: faults.notice(stuck=1.0)), 6.0, 2, has_sessions=True),
    _MANY,
    Family("failures", Faults.failures, 6.0, 2, charges=True),
    Family("killed-worker", _one(lambda faults: faults.fail_worker("killed")), 6.0, 2, charges=True),
    Family("break", _one(Faults.break_connection), 6.0, 2),
    Family("hole", _one(lambda faults: faults.cut(one_way=False)), 8.0, 2, divided=True),
    Family("one-way-hole", _one(lambda faults: faults.cut(one_way=True)), 8.0, 3, divided=True),
    Family("slow-table", _one(Faults.slow_table), 14.0, 2),
    Family("crash-point", Faults.crash_point, 14.0, 1),
    _MANY,
    Family("return", _one(Faults.replace), 6.0, 1),
    Family("rows-back", Faults.rows_back, 9.0, 2),  # noticed late, perhaps while the workers end after the last step
    Family("rows-back-alone", Faults.rows_back_alone, 30.0, 1),
    Family("closing", Faults.closing, 7.0, 1),
    Family("leaver-dies", Faults.leaver_dies, 6.0, 1),
    Family("at-seal", Faults.at_seal, 14.0, 2),
    Family("only-member", Faults.only_member, 20.0, 1, divided=True),
    Family("late-member", Faults.late_member, 6.0, 1),
    _MANY,
    Family("two", Faults.two, 25.0, 3, divided=True, mixed=True),
)
