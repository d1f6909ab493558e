"""Joining: storms of nodes, a thousand nodes in simulated time, and what a run asks of the table while it trains.

In a storm, 64 to 256 nodes come at once; measured is how long it takes until all are in, and how much they write for
it. Each node is a thread with a handler, connections and credentials of its own, and all are in one process, which has
the store's or the emulator's other end on the same machine. Every handler is made and connected before the clock
starts; the clock runs from the common call of ``next_rendezvous()``, for ours of ``announce()`` before it, until the
last one has returned.

``python benchmarks/joining.py simulation 1000`` and ``python benchmarks/joining.py steady 3 8`` print the other two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from systems import C10D, OURS, ROW, SYSTEMS
from torch.distributed import TCPStore

from azureml_elastic.local.azurite import Azurite
from azureml_elastic.node.table import Row, Table

__all__ = [
    "SCENARIOS",
    "USD_PER_CALL",
    "SimulatedStorm",
    "Steady",
    "Storm",
    "StormFailed",
    "measure_steady",
    "measure_storm",
    "simulate",
]

USD_PER_CALL = 0.00036 / 10_000
"""What one call of a table costs: the list price of Azure Table Storage's transactions (locally redundant, US regions),
by https://azure.microsoft.com/pricing/details/storage/tables/. An assumption: it was not looked up by this program, and
it differs by region and redundancy."""

_OPENING_SECONDS = 60.0
_OPENING_SECONDS_A_NODE = 0.5  # a client of the emulator is made and connected by then, also on a busy machine
_STACK_BYTES = 1 << 20  # hundreds of threads, each with two more for its connections
_SIMULATION = Path(__file__).parent.parent / "tests" / "node" / "rendezvous"


@dataclass(frozen=True)
class Storm:
    """What came of one storm.

    Args:
        seconds: until the last node was in, ``None`` when the limit was exceeded.
        joined: nodes that were in by then.
        writes: that were tried, at the table or the store.
        conflicts: of these, writes in vain because another node had been faster.
        reads: of the table; 0 where they were not counted.
    """

    seconds: float | None
    joined: int
    writes: int
    conflicts: int
    reads: int = 0


class StormFailed(Exception):
    """Something other than the limit ended the storm."""


def measure_storm(system: str, nodes: int, limit_s: float) -> Storm:
    """Let so many nodes join at once, in a process of their own.

    Raises:
        StormFailed: a node could not join, or the nodes did not agree.
        subprocess.TimeoutExpired: the handlers could not even be made in time.
    """
    needs_table: AbstractContextManager[Azurite | None] = nullcontext() if system == C10D else Azurite()
    with needs_table as azurite:
        command = [sys.executable, __file__, system, str(nodes), str(round(limit_s))]
        environment = {**os.environ, "BENCH_ENDPOINT": azurite.endpoint if azurite else ""}
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s + _OPENING_SECONDS + nodes * _OPENING_SECONDS_A_NODE,
            check=False,
        )
    if result.returncode:
        raise StormFailed(f"The storm of {nodes} nodes ({system}) failed: {result.stderr[-2000:]}")
    return Storm(**json.loads(result.stdout.splitlines()[-1]))


class Counter:
    """Counts calls over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads = 0
        self.writes = 0
        self.conflicts = 0

    def count(self, *, conflict: bool) -> None:
        with self._lock:
            self.writes += 1
            self.conflicts += conflict

    def count_read(self) -> None:
        with self._lock:
            self.reads += 1


class CountingTable:
    """Our table, with its calls counted; implements ``Table``."""

    def __init__(self, table: Table, counter: Counter) -> None:
        self._table = table
        self._counter = counter
        self.close = table.close

    def get(self, key: str) -> Row | None:
        self._counter.count_read()
        return self._table.get(key)

    def query(self, prefix: str) -> Iterator[Row]:
        self._counter.count_read()
        return self._table.query(prefix)

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        return self._write(self._table.insert, key, value)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        return self._write(self._table.replace, key, value, etag)

    def delete(self, key: str, etag: str | None = None) -> None:
        self._write(self._table.delete, key, etag)

    def _write(self, call: Callable[..., Any], *arguments: Any) -> Any:
        from azureml_elastic.errors import RowChanged, RowExists

        try:
            result = call(*arguments)
        except (RowExists, RowChanged):
            self._counter.count(conflict=True)
            raise
        self._counter.count(conflict=False)
        return result


def _our_joins(nodes: int, counter: Counter) -> list[Callable[[], Any]]:
    from azureml_elastic.node.rendezvous.handler import Rendezvous
    from azureml_elastic.node.rendezvous.round import Limits
    from azureml_elastic.node.table import open_table
    from azureml_elastic.node.torchrun import TableRendezvousHandler
    from azureml_elastic.spec import RendezvousTimings, TableRendezvous

    where = TableRendezvous(endpoint=os.environ["BENCH_ENDPOINT"])
    run_id = f"storm-{secrets.token_hex(4)}"
    joins: list[Callable[[], Any]] = []
    for number in range(nodes):
        table = CountingTable(open_table(where, run_id, {}), counter)
        rendezvous = Rendezvous(table, f"node-{number:03d}", "127.0.0.1", 1, Limits(nodes, nodes), RendezvousTimings())

        def join(rendezvous: Rendezvous = rendezvous) -> Any:
            rendezvous.announce()  # a node's first act, long before; here it counts
            return TableRendezvousHandler(rendezvous, run_id).next_rendezvous()

        joins.append(join)
    return joins


def _peer_joins(system: str, nodes: int, counter: Counter, server: TCPStore) -> list[Callable[[], Any]]:
    from peers import OneRowBackend
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

    from azureml_elastic.node.table.opening import emulator_connection_string

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    run_id = f"storm-{secrets.token_hex(4)}"
    joins: list[Callable[[], Any]] = []
    for _ in range(nodes):
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        backend: RendezvousBackend
        if system == ROW:
            backend = OneRowBackend(emulator_connection_string(os.environ["BENCH_ENDPOINT"]), run_id)
        else:
            backend = C10dRendezvousBackend(store, run_id)
        set_state = backend.set_state

        def counted(state: bytes, token: Any = None, set_state: Callable[..., Any] = set_state) -> Any:
            response = set_state(state, token)
            counter.count(conflict=response is None or not response[2])
            return response

        backend.set_state = counted  # type: ignore[method-assign]
        parameters = RendezvousParameters(system, "", run_id, nodes, nodes, local_addr="127.0.0.1")
        joins.append(create_handler(store, backend, parameters).next_rendezvous)
    return joins


def _storm(joins: list[Callable[[], Any]], counter: Counter, limit_s: float) -> Storm:
    """Run all joins at once.

    Raises:
        RuntimeError: the nodes did not agree, or one of them failed.
    """
    start = threading.Barrier(len(joins) + 1)
    arrived: dict[int, Any] = {}
    failed: list[BaseException] = []
    changed = threading.Condition()

    def run(number: int) -> None:
        start.wait()
        try:
            information = joins[number]()
        except Exception as error:
            with changed:
                failed.append(error)
                changed.notify_all()
            return
        with changed:
            arrived[number] = information
            changed.notify_all()

    for number in range(len(joins)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    start.wait()
    begun = time.monotonic()
    with changed:
        changed.wait_for(lambda: failed or len(arrived) == len(joins), limit_s)
        seconds = time.monotonic() - begun
        if failed:
            raise RuntimeError("a node could not join") from failed[0]
        if len(arrived) < len(joins):
            return Storm(None, len(arrived), counter.writes, counter.conflicts, counter.reads)
        places = {(information.rank, information.world_size) for information in arrived.values()}
    if places != {(rank, len(joins)) for rank in range(len(joins))}:
        raise RuntimeError(f"the nodes do not agree on their places: {sorted(places)}")
    return Storm(seconds, len(arrived), counter.writes, counter.conflicts, counter.reads)


# --- a thousand nodes in simulated time ------------------------------------------------------------------------------

SCENARIOS: Mapping[str, str] = {
    "at once": "all come at the same moment, and the run needs all of them",
    "within a second": "they come one after another within a second, and the run needs all of them",
    "at random": "they come in random bunches over some seconds, and the run starts with the first hundred",
    "growth": "one node trains already; all others come within a second",
}
"""By name, what happens in a simulated storm."""


@dataclass(frozen=True)
class SimulatedStorm:
    """What came of one simulated storm.

    Args:
        scenario: one of :data:`SCENARIOS`.
        nodes: that came.
        seconds: simulated, from the arrival of the last node until all are in one round.
        rounds: that were sealed until then.
        writes: of its own row by the node that wrote most: one to announce itself, one for each round it waited for.
        conflicts: writes in vain because another node had been faster.
        calls: of the table, all together; a query counts once for each page.
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
    sys.path.insert(0, str(_SIMULATION))
    from simulation import Cluster

    from azureml_elastic.node.rendezvous.round import Limits

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
    """What a sealed round asks of the table, with default settings.

    Args:
        nodes: members.
        spares: nodes beside it.
        seconds: for which calls were counted.
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
    from azureml_elastic.node.rendezvous.handler import Rendezvous
    from azureml_elastic.node.rendezvous.round import Limits
    from azureml_elastic.node.table import open_table
    from azureml_elastic.spec import RendezvousTimings, TableRendezvous

    counter, over = Counter(), threading.Event()
    with Azurite() as azurite, contextlib.ExitStack() as stack:
        table = CountingTable(open_table(TableRendezvous(endpoint=azurite.endpoint), "steady", {}), counter)
        stack.callback(table.close)
        made = [
            Rendezvous(
                table, f"node-{number:03d}", "127.0.0.1", 1, Limits(nodes, nodes), RendezvousTimings(), over.is_set
            )
            for number in range(nodes + spares)
        ]

        def live(rendezvous: Rendezvous) -> None:
            with contextlib.suppress(InterruptedError):
                rendezvous.join()
                while not over.wait(0.1):
                    assert not rendezvous.status().broken, "the round has ended"

        with ThreadPoolExecutor(len(made)) as pool:
            futures = [pool.submit(live, rendezvous) for rendezvous in made[:nodes]]
            _wait_until(lambda: all(rendezvous.last_round for rendezvous in made[:nodes]))
            futures += [pool.submit(live, rendezvous) for rendezvous in made[nodes:]]
            leader = next(rendezvous for rendezvous in made if rendezvous.leads)
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


# --- the command line ------------------------------------------------------------------------------------------------


def _print_simulations(arguments: argparse.Namespace) -> None:
    for scenario in [arguments.scenario] if arguments.scenario else SCENARIOS:
        print(json.dumps(asdict(_simulate_here(scenario, arguments.numbers[0], arguments.seed))), flush=True)


def _print_steady(arguments: argparse.Namespace) -> None:
    for nodes in arguments.numbers:
        steady = measure_steady(nodes, arguments.spares, arguments.seconds)
        line = {"per_node_and_second": steady.per_node_and_second, "usd_per_day": steady.usd_per_day}
        print(json.dumps({**asdict(steady), **line}), flush=True)


def _print_storm(arguments: argparse.Namespace) -> None:
    nodes, limit_s = arguments.numbers
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(_STACK_BYTES)
    counter = Counter()
    if arguments.what == OURS:
        joins = _our_joins(nodes, counter)
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        joins = _peer_joins(arguments.what, nodes, counter, server)
    print(json.dumps(asdict(_storm(joins, counter, limit_s))), flush=True)
    os._exit(0)  # heartbeats and threads that still wait end here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulation", "steady", *SYSTEMS], help="or the system whose storm to measure")
    parser.add_argument("numbers", type=int, nargs="+", help="of nodes; for a storm the nodes and the limit in seconds")
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="of the simulation; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--spares", type=int, default=0, help="beside the steady round")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which the steady round is watched")
    arguments = parser.parse_args()
    {"simulation": _print_simulations, "steady": _print_steady}.get(arguments.what, _print_storm)(arguments)


if __name__ == "__main__":
    main()
