"""Join storms: the time until 64 to 256 simultaneous nodes are in one round, and their writes.

Each node is a thread with its own handler, connections and credentials, all in one process; the store or the emulator
runs on the same machine. Handlers are created and connected before the clock starts. It runs from the simultaneous call
of ``next_rendezvous()`` (for this library, of ``announce()`` before it) until the last call has returned. :mod:`scale`
simulates more nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from counting import Counter, CountingTable
from scale import SCENARIOS, USD_PER_CALL, SimulatedStorm, Steady, StormFailed, measure_steady, simulate
from systems import C10D, OURS, ROW, SYSTEMS
from torch.distributed import TCPStore

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.local.azurite import Azurite

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

_OPENING_SECONDS = 60.0
_OPENING_SECONDS_A_NODE = 0.5  # a client of the emulator is made and connected by then, also on a busy machine
_STACK_BYTES = 1 << 20  # hundreds of threads, each with two more for its connections


@dataclass(frozen=True)
class Storm:
    """Result of one join storm.

    Args:
        seconds: time until the last node was in the round, ``None`` if the limit was exceeded.
        joined: number of nodes in the round by then.
        writes: number of attempted writes to the table or the store.
        conflicts: number of writes that failed because another node was faster.
        reads: number of reads from the table; 0 if not counted.
    """

    seconds: float | None
    joined: int
    writes: int
    conflicts: int
    reads: int = 0


def measure_storm(system: str, nodes: int, limit_s: float) -> Storm:
    """Run a join storm in a separate process.

    Raises:
        StormFailed: a node could not join, or the nodes did not agree.
        subprocess.TimeoutExpired: the handlers could not even be made in time.
    """
    needs_table: AbstractContextManager[Azurite | None] = nullcontext() if system == C10D else Azurite()
    with needs_table as azurite:
        command = [sys.executable, __file__, system, str(nodes), str(limit_s)]
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


def _our_joins(nodes: int, counter: Counter) -> list[Callable[[], Any]]:
    from azureml_elastic.config import RendezvousTimings, TableRendezvous
    from azureml_elastic.node.core.round import Limits
    from azureml_elastic.node.rendezvous.context import LocalNode
    from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
    from azureml_elastic.node.rendezvous.torchrun import TableRendezvousHandler
    from azureml_elastic.node.table import open_table

    where = TableRendezvous(endpoint=os.environ["BENCH_ENDPOINT"])
    run_id = f"storm-{secrets.token_hex(4)}"
    joins: list[Callable[[], Any]] = []
    announced = threading.Barrier(nodes)
    for number in range(nodes):
        table = CountingTable(open_table(where, run_id, NodeEnvironment.read({})), counter)
        rendezvous = Rendezvous(
            table, LocalNode(f"node-{number:03d}", "127.0.0.1"), Limits(nodes, nodes), RendezvousTimings()
        )

        def join(rendezvous: Rendezvous = rendezvous) -> Any:
            rendezvous.announce()  # part of the measured time here; in a run, imports of seconds follow
            announced.wait()
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
        ranks = {(information.rank, information.world_size) for information in arrived.values()}
    if ranks != {(rank, len(joins)) for rank in range(len(joins))}:
        raise RuntimeError(f"the nodes do not agree on their ranks: {sorted(ranks)}")
    return Storm(seconds, len(arrived), counter.writes, counter.conflicts, counter.reads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("nodes", type=int)
    parser.add_argument("limit", type=float)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(_STACK_BYTES)
    counter = Counter()
    if arguments.system == OURS:
        joins = _our_joins(arguments.nodes, counter)
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        joins = _peer_joins(arguments.system, arguments.nodes, counter, server)
    print(json.dumps(asdict(_storm(joins, counter, arguments.limit))), flush=True)
    os._exit(0)  # ends heartbeats and waiting threads


if __name__ == "__main__":
    main()
