"""False alarms of the limit of silence: nodes that pause, and are taken for lost, in 100 simulated hours.

No node of the simulation ever ends. Each pauses now and then, for a time of a heavy-tailed distribution, and goes on. A
round that ends because a node has been silent is a false alarm, be it a member whose hub gives it up, or rank 0's node,
which its members give up. The hub's state and the limits are those of the product; beats, pauses and rounds are
simulated. The rule before this one, a fixed limit, is simulated with the same pauses.

The time until a node that is really gone counts as lost is the limit after each pause, weighted by the time for which
it holds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core.hub_state import CloseLink, HubState
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector, SilenceLimit
from azureml_elastic.node.core.round import Limits, Member, Round

__all__ = ["SCENARIOS", "Alarms", "FixedLimit", "Scenario", "simulate_pauses"]

_QUIET_SECONDS = 10.0
"""Time without pauses after which nothing changes: it is left out up to the next pause."""

_LONGEST_PAUSE = 120.0

_SEEDS_OF_RARE = 10
"""Runs of a scenario with few pauses for each one of the others."""


class FixedLimit(SilenceLimit):
    """The rule before: the same limit for all peers at all times."""

    def __init__(self, timings: RendezvousTimings) -> None:
        super().__init__(timings)
        self.shortest = self.longest = self.timeout

    def learn(self, pause: float, now: float) -> None:
        """Learn nothing."""


BEFORE = RendezvousTimings(heartbeat_interval=timedelta(seconds=1), heartbeat_timeout=timedelta(seconds=3))


@dataclass(frozen=True)
class Scenario:
    """Pauses of the nodes of a run.

    Args:
        name: what pauses them.
        per_hour: pauses of a node in an hour.
        seconds: function that draws the length of one.
    """

    name: str
    per_hour: float
    seconds: Callable[[random.Random], float]


def _pareto(shortest: float, exponent: float) -> Callable[[random.Random], float]:
    return lambda source: shortest * source.paretovariate(exponent)


def _lognormal(median: float, sigma: float) -> Callable[[random.Random], float]:
    return lambda source: source.lognormvariate(math.log(median), sigma)


SCENARIOS = (
    Scenario("quiet machines: 20 an hour, log-normal, median 20 ms", 20.0, _lognormal(0.02, 1.0)),
    Scenario("one in 50 hours, Pareto from 0.1 s, exponent 1.1", 0.02, _pareto(0.1, 1.1)),
    Scenario("one in 5 hours, Pareto from 0.1 s, exponent 1.1", 0.2, _pareto(0.1, 1.1)),
    Scenario("2 an hour, Pareto from 0.1 s, exponent 1.1", 2.0, _pareto(0.1, 1.1)),
    Scenario("2 an hour, Pareto from 0.2 s, exponent 1.5", 2.0, _pareto(0.2, 1.5)),
    Scenario("live migrations: one in 5 hours, log-normal, median 1.2 s, sigma 0.4", 0.2, _lognormal(1.2, 0.4)),
    Scenario("overloaded: 20 an hour, log-normal, median 0.5 s, sigma 1", 20.0, _lognormal(0.5, 1.0)),
)


@dataclass
class Alarms:
    """Result of a simulation.

    Args:
        pauses: number of pauses.
        rounds: rounds that ended because a node was taken for lost: the false alarms.
        limit: mean limit of a member's silence in seconds, over time.
    """

    pauses: int = 0
    rounds: int = 0
    limit: float = 0.0


@dataclass
class _Node:
    name: str
    silence: SilenceLimit
    paused_until: float = 0.0
    link: int = 0
    received: float = 0.0
    beats: BeatWatch | None = None
    pauses: PauseDetector | None = None
    inside: bool = False


@dataclass
class _Cluster:
    """The nodes of a run, and the hub of rank 0's node."""

    timings: RendezvousTimings
    rule: Callable[[RendezvousTimings], SilenceLimit]
    count: int
    now: float = 0.0
    alarms: int = 0
    nodes: list[_Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = [_Node(f"node-{number}", self.rule(self.timings)) for number in range(self.count)]
        self._tick = self.timings.heartbeat_interval.total_seconds() / 2
        self._links = itertools.count()
        self._number = 0
        self._hubs = {
            each.name: HubState(Limits(1, self.count), self.timings, 0.0, each.silence) for each in self.nodes
        }
        self._detectors = {each.name: PauseDetector(0.0, self._tick) for each in self.nodes}
        self._received: dict[int, float] = {}
        self._form()

    def advance(self) -> None:
        """Advance by one beat."""
        self.now += self._tick
        running = [node for node in self.nodes if node.paused_until <= self.now]
        leader = self._leader
        for node in running:
            if node.inside and leader in running:
                node.received = self.now  # a process that goes on reads what has arrived before it looks at the time
                node.silence.learn(leader.silence.pause, self.now)
                leader.silence.learn(node.silence.pause, self.now)
        if leader in running:
            arrived = {node.link: self.now for node in running if node.inside}
            self._received.update(arrived)
            actions = self._hubs[leader.name].ticked(self.now, self._received) or []
            lost = {action.link for action in actions if isinstance(action, CloseLink)}
        else:
            lost = set()
        given_up = False
        for node in running:
            assert node.pauses is not None
            assert node.beats is not None
            node.pauses.tick(self.now)
            if node.inside and node is not leader and node.beats.is_lost(node.received, self.now):
                node.silence.gave_up(leader.name, node.received)
                given_up = True
        if lost or given_up:
            self.alarms += 1
            self._form(without={leader.name} if given_up else {node.name for node in self.nodes if node.link in lost})
        elif any(not node.inside for node in running):
            self._form()  # it has gone on, and joins at a step boundary

    @property
    def limit(self) -> float:
        """The limit of a member's silence."""
        return self._leader.silence.seconds(1000)

    def _form(self, without: Collection[str] = ()) -> None:
        """Begin a round of the nodes that run; members that pause stay in it unless one of them is given up."""
        self._number += 1
        members = [
            node
            for node in self.nodes
            if node.name not in without and (node.paused_until <= self.now or (node.inside and not without))
        ]
        for node in self.nodes:
            was_inside, node.inside = node.inside, node in members
            if node.inside and not was_inside:
                for other in self.nodes:
                    other.silence.returned(node.name, self.now)
        self._leader = leader = members[0]
        rows = tuple(Member(node.name, node.name, round=self._number, host="h", hub_port=1) for node in members)
        hub = self._hubs[leader.name]
        hub.ticked(self.now, {})  # a hub looks at the time also when it has no members
        hub.enter(Round(self._number, "sealed", members=rows), self.now)
        self._received = {}
        for node in members:
            node.link = next(self._links)
            hub.greeted(node.link, node.name, node.name, self._number, self.now)
            self._received[node.link] = node.received = self.now
            node.pauses = self._detectors[node.name]
            node.beats = BeatWatch(node.silence, node.pauses, self.now)


def _pauses(scenario: Scenario, nodes: int, hours: float, seed: int) -> Iterator[tuple[float, int, float]]:
    """Yield the beginning, the node and the length of each pause."""
    source = random.Random(seed)
    now = 0.0
    while (now := now + source.expovariate(scenario.per_hour * nodes / 3600)) < hours * 3600:
        yield now, source.randrange(nodes), min(_LONGEST_PAUSE, scenario.seconds(source))


def simulate_pauses(
    scenario: Scenario,
    *,
    seed: int,
    rule: Callable[[RendezvousTimings], SilenceLimit] = SilenceLimit,
    timings: RendezvousTimings | None = None,
    nodes: int = 8,
    hours: float = 100.0,
) -> Alarms:
    """Return the false alarms of a rule.

    Args:
        scenario: the pauses.
        seed: number from which the pauses follow.
        rule: the limit of the silence.
        timings: heartbeat interval and timeout.
        nodes: number of nodes.
        hours: simulated hours.
    """
    cluster = _Cluster(timings or RendezvousTimings(), rule, nodes)
    found = Alarms()
    skipped, at = 0.0, 0.0
    for begin, number, seconds in [*_pauses(scenario, nodes, hours, seed), (hours * 3600, 0, 0.0)]:
        found.limit += cluster.limit * max(0.0, begin - at)
        quiet_at = max([node.paused_until for node in cluster.nodes], default=0.0) + _QUIET_SECONDS
        while cluster.now + skipped < begin and cluster.now < quiet_at:
            cluster.advance()
        skipped = max(skipped, begin - cluster.now)
        at = begin
        if seconds:
            found.pauses += 1
            node = cluster.nodes[number]
            node.paused_until = max(node.paused_until, begin - skipped + seconds)
    return Alarms(found.pauses, cluster.alarms, found.limit / (hours * 3600))


def table(hours: float, nodes: int, seeds: int) -> str:
    """Return the false alarms of both rules in each scenario, means of several seeds."""
    lines = [
        f"| pauses of {nodes} nodes in {hours:g} hours | pauses | 3 s for all | learned | mean limit |",
        "| --- | --- | --- | --- | --- |",
    ]
    for scenario in SCENARIOS:
        runs = range(seeds if scenario.per_hour > 1 else _SEEDS_OF_RARE * seeds)
        before = [
            simulate_pauses(scenario, seed=seed, rule=FixedLimit, timings=BEFORE, nodes=nodes, hours=hours)
            for seed in runs
        ]
        now = [simulate_pauses(scenario, seed=seed, nodes=nodes, hours=hours) for seed in runs]
        lines.append(
            f"| {scenario.name} | {fmean(each.pauses for each in now):.0f} "
            f"| {fmean(each.rounds for each in before):.1f} | {fmean(each.rounds for each in now):.1f} "
            f"| {fmean(each.limit for each in now):.2f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=100.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    print(table(arguments.hours, arguments.nodes, arguments.seeds))
