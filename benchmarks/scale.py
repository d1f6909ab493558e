"""A thousand nodes that join in simulated time, and table calls of a run during training.

``python benchmarks/scale.py simulation 1000`` and ``python benchmarks/scale.py steady 3 8`` print the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from counting import Counter, CountingTable

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import NodeLeaving
from azureml_elastic.local.azurite import Azurite

__all__ = ["SCENARIOS", "USD_PER_CALL", "SimulatedStorm", "Steady", "StormFailed", "measure_steady", "simulate"]

USD_PER_CALL = 0.00036 / 10_000
"""What one call of a table costs: the list price of Azure Table Storage's transactions (locally redundant, US regions),
by https://azure.microsoft.com/pricing/details/storage/tables/. An assumption: it was not looked up by this program, and
it differs by region and redundancy."""

_OPENING_SECONDS = 60.0
_ROOT = Path(__file__).resolve().parents[1]


class StormFailed(Exception):
    """Something other than the limit ended the storm."""


# --- a thousand nodes ------------------------------------------------------------------------------------------------

SCENARIOS: Mapping[str, str] = {
    "at once": "all come at the same moment, and the run needs all of them",
    "within a second": "they come one after another within a second, and the run needs all of them",
    "at random": "they come in random bunches over some seconds, and the run starts with the first hundred",
    "growth": "one node trains already; all others come within a second",
}
"""By name, what happens in a simulated storm."""


@dataclass(frozen=True)
class SimulatedStorm:
    """Result of one simulated join storm.

    Args:
        scenario: one of :data:`SCENARIOS`.
        nodes: number of nodes.
        seconds: simulated time from the arrival of the last node until all nodes are in one round.
        rounds: number of sealed rounds until then.
        writes: maximum number of writes of a node's own row: one announcement, and one per round it waited for.
        conflicts: number of writes that failed because another node was faster.
        calls: total number of table calls; a query counts once per page.
    """

    scenario: str
    nodes: int
    seconds: float
    rounds: int
    writes: int
    conflicts: int
    calls: int


def simulate(scenario: str, nodes: int = 1000, seed: int = 0) -> SimulatedStorm:
    """Let nodes join in simulated time, with 10 ms a table call and 2,000 calls a second, in a process of its own.

    Raises:
        StormFailed: a join was lost, or the nodes did not agree.
        subprocess.TimeoutExpired: the simulation did not end.
    """
    command = [sys.executable, __file__, "simulation", str(nodes), "--scenario", scenario, "--seed", str(seed)]
    limit_s = 60 + 0.6 * nodes
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if result.returncode:
        raise StormFailed(f"The simulated storm {scenario!r} of {nodes} nodes failed: {result.stderr[-2000:]}")
    return SimulatedStorm(**json.loads(result.stdout.splitlines()[-1]))


def _arrivals(scenario: str, nodes: int, seed: int) -> tuple[list[float], int]:
    """Return when the nodes come, and the minimum of the run."""
    choose = random.Random(seed)
    within_a_second = [number / nodes for number in range(nodes)]
    if scenario == "at once":
        return [0.0] * nodes, nodes
    if scenario == "within a second":
        return choose.sample(within_a_second, nodes), nodes
    if scenario == "growth":
        return [0.0, *(3.0 + moment for moment in choose.sample(within_a_second, nodes - 1))], 1
    bunches = [choose.uniform(0, 6) for _ in range(5)]
    return [choose.choice(bunches) + choose.expovariate(4) for _ in range(nodes)], max(1, nodes // 10)


def _simulate_here(scenario: str, nodes: int, seed: int) -> SimulatedStorm:
    sys.path.insert(0, str(_ROOT))
    from azureml_elastic.node.core.round import Limits
    from tests.support.rendezvous.simulation import Cluster

    cluster = Cluster(seed=seed)
    arrivals, minimum = _arrivals(scenario, nodes, seed)
    for number, arrives_at in enumerate(arrivals):
        cluster.add(f"node-{number:04d}", Limits(minimum, nodes), arrives_at)
    settled = cluster.settle(max(arrivals) + 120.0, nodes)
    cluster.verify()
    return SimulatedStorm(
        scenario=scenario,
        nodes=nodes,
        seconds=settled - max(arrivals),
        rounds=sum(round_.state == "sealed" for round_ in cluster.rounds()),
        writes=cluster.most_writes(),
        conflicts=len(cluster.conflicts),
        calls=cluster.storage.calls.total(),
    )


# --- while the run trains --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """Table calls of a sealed round with default settings.

    Args:
        nodes: members.
        spares: nodes beside it.
        seconds: duration of the count.
        calls: all together.
    """

    nodes: int
    spares: int
    seconds: float
    calls: int

    @property
    def per_node_and_second(self) -> float:
        return self.calls / (self.nodes + self.spares) / self.seconds

    @property
    def usd_per_day(self) -> float:
        """The price of that many calls for a day, at :data:`USD_PER_CALL`."""
        return self.calls / self.seconds * 86_400 * USD_PER_CALL


def measure_steady(nodes: int, spares: int = 0, seconds: float = 30.0) -> Steady:
    """Count the calls of a rendezvous whose round is sealed, each node a thread, over the emulator.

    Nodes look at their round every 0.1 s, as agents do. What agents add to that are two calls for each checkpoint and
    a call for each rarer event of the ledger.
    """
    from azureml_elastic.config import RendezvousTimings, TableRendezvous
    from azureml_elastic.node.core.round import Limits
    from azureml_elastic.node.rendezvous.context import LocalNode, Surroundings
    from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
    from azureml_elastic.node.table import open_table

    class Leaving(Surroundings):
        def __init__(self, noticed: threading.Event) -> None:
            self.must_leave = noticed.is_set

    counter, over = Counter(), threading.Event()
    with Azurite() as azurite, contextlib.ExitStack() as stack:
        table = CountingTable(
            open_table(TableRendezvous(endpoint=azurite.endpoint), "steady", NodeEnvironment.read({})), counter
        )
        stack.callback(table.close)
        made = [
            Rendezvous(
                table,
                LocalNode(f"node-{number:03d}", "127.0.0.1"),
                Limits(nodes, nodes),
                RendezvousTimings(),
                Leaving(over),
            )
            for number in range(nodes + spares)
        ]

        def live(rendezvous: Rendezvous) -> None:
            with contextlib.suppress(NodeLeaving):
                rendezvous.join()
                while not over.wait(0.1):
                    assert not rendezvous.status().broken, "the round has ended"

        with ThreadPoolExecutor(len(made)) as pool:
            futures = [pool.submit(live, rendezvous) for rendezvous in made[:nodes]]
            _wait_until(lambda: all(rendezvous.machine.last_round for rendezvous in made[:nodes]))
            futures += [pool.submit(live, rendezvous) for rendezvous in made[nodes:]]
            leader = next(rendezvous for rendezvous in made if rendezvous.machine.leads)
            _wait_until(lambda: len(leader.hub.view().waiting) == spares)
            before, begun = counter.reads + counter.writes, time.monotonic()
            over.wait(seconds)
            result = Steady(nodes, spares, time.monotonic() - begun, counter.reads + counter.writes - before)
            broken = [future for future in futures if future.done()]
            over.set()
            for rendezvous in made:
                rendezvous.wake.set()
        for rendezvous in made:
            rendezvous.shutdown()
        for future in broken:
            future.result()  # raises what ended it
        return result


def _wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + _OPENING_SECONDS
    while not condition():
        if time.monotonic() > limit:
            raise StormFailed(f"The nodes were not in one round within {_OPENING_SECONDS:g} s.")
        time.sleep(0.01)


def _print_simulations(arguments: argparse.Namespace) -> None:
    for scenario in [arguments.scenario] if arguments.scenario else SCENARIOS:
        print(json.dumps(asdict(_simulate_here(scenario, arguments.numbers[0], arguments.seed))), flush=True)


def _print_steady(arguments: argparse.Namespace) -> None:
    for nodes in arguments.numbers:
        steady = measure_steady(nodes, arguments.spares, arguments.seconds)
        line = {"per_node_and_second": steady.per_node_and_second, "usd_per_day": steady.usd_per_day}
        print(json.dumps({**asdict(steady), **line}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulation", "steady"])
    parser.add_argument("numbers", type=int, nargs="+", help="of nodes")
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="of the simulation; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--spares", type=int, default=0, help="beside the steady round")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which the steady round is watched")
    arguments = parser.parse_args()
    {"simulation": _print_simulations, "steady": _print_steady}[arguments.what](arguments)


if __name__ == "__main__":
    main()
