"""Memory of a node's agent and preload server over many rounds, each of which ends with the loss of a worker."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from startup_cluster import Cluster, started_nodes
from startup_systems import System

from azureml_elastic.local.azurite import Azurite

__all__ = ["Growth", "Sample", "growth_table", "measure_growth"]

_SAMPLES = 20
_STEPS = 2
"""Steps of a round before its end: without progress, the run would give up."""

_LIMIT_S = 60.0


@dataclass(frozen=True)
class Sample:
    """Memory in MB after so many rounds, means of the nodes.

    Args:
        rounds: rounds until now.
        agent_rss: resident pages of the agent.
        agent_uss: private pages of the agent.
        preload_rss: resident pages of the preload server.
        preload_uss: private pages of the preload server.
        others_uss: private pages of all other processes beside the workers.
    """

    rounds: int
    agent_rss: float
    agent_uss: float
    preload_rss: float
    preload_uss: float
    others_uss: float


@dataclass(frozen=True)
class Growth:
    """Samples of one system.

    Args:
        system: name of the system.
        rounds: rounds in which a worker was lost.
        seconds: how long all of them took.
        samples: memory over the rounds.
    """

    system: str
    rounds: int
    seconds: float
    samples: tuple[Sample, ...]

    def per_hundred(self, what: Callable[[Sample], float]) -> float:
        """Return the slope in MB per hundred rounds, without the first fifth, in which caches fill."""
        settled = [each for each in self.samples if each.rounds >= self.rounds / 5]
        if len(settled) < 2:
            return 0.0
        slope = statistics.linear_regression([each.rounds for each in settled], [what(each) for each in settled]).slope
        return 100 * slope


def measure_growth(system: System, rounds: int, azurite: Azurite) -> Growth:
    """Let two nodes lose a worker in each round, in turn, and observe the processes that stay.

    Args:
        system: the system.
        rounds: number of rounds.
        azurite: emulator of the table.
    """
    every = max(1, rounds // _SAMPLES)
    samples = []
    with started_nodes(system, (2, 2), 2, azurite) as (cluster, began):
        if cluster.wait_for_steps(began, _LIMIT_S).seconds is None:
            raise RuntimeError(f"{system.name} has not started:\n{cluster.trees.logs()}")
        cluster.settle()
        samples.append(_sample(cluster, 0))
        begun, last = time.monotonic(), _wait_for_round(cluster, 0)
        for number in range(1, rounds + 1):
            os.kill(cluster.steps_of(number % 2)[-1].pid, signal.SIGKILL)
            last = _wait_for_round(cluster, last)
            if number % every == 0:
                cluster.settle(5.0)
                samples.append(_sample(cluster, number))
                cluster.forget_steps()
            if number % 50 == 0:
                passed = time.monotonic() - begun
                print(f"{number} of {rounds} rounds of {system.name} in {passed:.0f} s", file=sys.stderr)
        return Growth(system.name, rounds, time.monotonic() - begun, tuple(samples))


def growth_table(found: Sequence[Growth]) -> str:
    """Return the first and the last sample, and the slope between, of each system."""
    parts: dict[str, Callable[[Sample], float]] = {
        "agent, RSS": lambda sample: sample.agent_rss,
        "agent, private": lambda sample: sample.agent_uss,
        "preload server, RSS": lambda sample: sample.preload_rss,
        "preload server, private": lambda sample: sample.preload_uss,
        "others, private": lambda sample: sample.others_uss,
    }
    lines = ["| | | before | after | MB per 100 rounds |", "| --- | --- | --- | --- | --- |"]
    for growth in found:
        for name, what in parts.items():
            first, last = what(growth.samples[0]), what(growth.samples[-1])
            lines.append(
                f"| {growth.system}, {growth.rounds} rounds | {name} | {first:.1f} MB | {last:.1f} MB "
                f"| {growth.per_hundred(what):+.2f} |"
            )
    return "\n".join(lines)


def _wait_for_round(cluster: Cluster, last: int) -> int:
    """Wait until both nodes have taken steps in one round after the last; return it."""
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
        newest = []
        for number in cluster.nodes:
            steps = cluster.steps_of(number)[-_STEPS:]
            rounds = {step.round for step in steps}
            newest.append(rounds.pop() if len(steps) == _STEPS and len(rounds) == 1 else 0)
        if min(newest) == max(newest) > last:
            return newest[0]
        time.sleep(0.02)
    raise RuntimeError(f"No round follows round {last}:\n{cluster.trees.logs()}")


def _sample(cluster: Cluster, rounds: int) -> Sample:
    nodes = [cluster.memory(number) for number in cluster.nodes]
    agents = [node.agent for node in nodes if node.agent is not None]
    preloads = [node.preload for node in nodes if node.preload is not None]
    return Sample(
        rounds,
        agent_rss=statistics.fmean([each.rss for each in agents] or [0.0]),
        agent_uss=statistics.fmean([each.uss for each in agents] or [0.0]),
        preload_rss=statistics.fmean([each.rss for each in preloads] or [0.0]),
        preload_uss=statistics.fmean([each.uss for each in preloads] or [0.0]),
        others_uss=statistics.fmean(sum(each.uss for each in node.others) for node in nodes),
    )
