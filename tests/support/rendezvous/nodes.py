"""Nodes of one run that join rounds through a real table and real sockets, each on its own thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.rendezvous.context import LocalNode, Runtime, Surroundings
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.table import open_table
from tests.support.waiting import until

TIMINGS = RendezvousTimings(
    heartbeat_interval=timedelta(seconds=0.2),
    heartbeat_timeout=timedelta(seconds=120),
    join_timeout=timedelta(seconds=120),
    settle_timeout=timedelta(seconds=120),
    rejoin_timeout=timedelta(seconds=120),
    takeover_delay=timedelta(seconds=3),
    rescale_debounce=timedelta(seconds=0.1),
    table_heartbeat_interval=timedelta(seconds=0.3),
    max_failed_rounds=4,
)
TIMEOUT = 60


class Counting:
    """A table that counts what goes through."""

    def __init__(self, table):
        self._table = table
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getattr__(self, name):
        call = getattr(self._table, name)

        def counted(*arguments):
            with self._lock:
                self.calls[name] += 1
            return call(*arguments)

        return counted


class Slow:
    """A table that answers only after some time."""

    def __init__(self, table, seconds: float):
        self._table = table
        self._seconds = seconds

    def __getattr__(self, name):
        call = getattr(self._table, name)

        def slow(*arguments):
            time.sleep(self._seconds)
            return call(*arguments)

        return slow


class Leaving(Surroundings):
    """An agent that leaves once an event is set."""

    def __init__(self, noticed: threading.Event) -> None:
        self._noticed = noticed

    def must_leave(self) -> bool:
        return self._noticed.is_set()


class Nodes:
    """Makes nodes, joins them in parallel, and ends them as SIGKILL would."""

    def __init__(self, endpoint, table="elastic"):
        where = TableRendezvous(endpoint=str(endpoint), table=table)
        self.table = Counting(open_table(where, "run", NodeEnvironment.read({})))
        self.pool = ThreadPoolExecutor(200)
        self.made: list[Rendezvous] = []
        self.over = threading.Event()
        self.timings = TIMINGS

    def hasten(self, **seconds: float) -> None:
        """Shorten timeouts of the nodes that are made from now on, for tests in which a node is silent."""
        self.timings = self.timings.model_copy(
            update={name: timedelta(seconds=value) for name, value in seconds.items()}
        )

    def make(
        self,
        name: str,
        minimum: int = 1,
        maximum: int = 8,
        slots: int = 1,
        table=None,
        program: str | None = None,
        noticed: threading.Event | None = None,
        runtime: Runtime | None = None,
        surroundings: Surroundings | None = None,
        host_id: str = "",
        quarantine: int | None = None,
    ) -> Rendezvous:
        node = Rendezvous(
            table or self.table,
            LocalNode(name, "127.0.0.1", slots, host_id, program=program),
            Limits(minimum, maximum, quarantine),
            self.timings,
            surroundings or Leaving(noticed or self.over),
            runtime=runtime,
        )
        self.made.append(node)
        return node

    def start(self, *nodes: Rendezvous) -> list[Future[Assignment]]:
        return [self.pool.submit(node.join) for node in nodes]

    def join(self, *nodes: Rendezvous) -> list[Assignment]:
        return [future.result(TIMEOUT) for future in self.start(*nodes)]

    def form(self, *nodes: Rendezvous) -> None:
        """Have nodes join of which each waits for all."""
        for node in nodes:
            node.announce()
        self.join(*nodes)

    def rejoin(self, *nodes: Rendezvous) -> list[Assignment]:
        """What the agent does when its round breaks."""

        def again(node: Rendezvous) -> Assignment:
            until(lambda: node.status().broken)
            status = node.status()
            if not status.over or status.lost:
                node.round_end.write(Reopen("lost", lost=status.lost))
            return node.join()

        return [future.result(TIMEOUT) for future in [self.pool.submit(again, node) for node in nodes]]

    @staticmethod
    def kill(node: Rendezvous) -> None:
        node.hub.close()
        node._heartbeat.stop()
        if node.membership.connected:
            node.membership.link._client.connection.close()

    def close(self) -> None:
        self.over.set()
        for node in self.made:
            node.queue.wake()
        self.pool.shutdown(wait=True)
        for node in self.made:
            node.shutdown()
        self.table.close()
