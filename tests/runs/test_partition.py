"""Nodes in network namespaces, some of which cannot reach each other: which nodes train, and what is reported.

Each node has a network namespace, and the table is a real Azurite that all of them reach. A pair is separated as by a
network that drops packets: each side's address of the other one leads nowhere. Ports are closed with iptables.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from azureml_elastic.config import (
    ElasticDistribution,
    ElasticResources,
    HealthPolicy,
    Plan,
    RendezvousTimings,
    TableRendezvous,
)
from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.events import (
    HangDetected,
    HealthChecked,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    Unreachable,
)
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.azurite import Azurite
from azureml_elastic.local.cluster import NODE_COMMAND
from azureml_elastic.local.node_start import NodeStart
from azureml_elastic.local.processes import NodeProcess, NodeProcesses
from tests.support.namespaces import Namespaces
from tests.support.node_server import FORKED, StartAt
from tests.support.paths import PROGRAMS

REPORTED_WITHIN_S = 30.0
"""It takes 2 to 6 s; nodes that wait for each other instead hang for minutes."""
NODES = ("node-a", "node-b", "node-c")
PORTS = (29400, 29420)


class Network(Namespaces):
    """Three machines on one switch, with a table beside it."""

    def __init__(self, folder: Path, starting: NodeStart = FORKED) -> None:
        super().__init__(NODES)
        self.folder = folder
        self._starting = StartAt(network=lambda env: self.space(env[variables.NODE_ID]), starting=starting)
        self._go = folder / "go"
        self._nodes: dict[str, NodeProcess] = {}

    def __enter__(self):
        super().__enter__()
        self.azurite = self.stack.enter_context(Azurite(host=f"{self.subnet}.1"))
        self._processes = self.stack.enter_context(NodeProcesses(self.folder, self._starting))
        return self

    def separate(self, one: str, *others: str, both: bool = True) -> None:
        for other in others:
            self.cut(one, other)
            if both:
                self.cut(other, one)

    def join(self, one: str, *others: str) -> None:
        for other in others:
            self.mend(one, other)
            self.mend(other, one)

    def close_ports(self, at: str, *match: str) -> None:
        if not shutil.which("iptables"):
            pytest.skip("closing ports needs iptables")
        self.within(at, "iptables", "-w", "-A", "INPUT", "-p", "tcp", *match, "-j", "DROP")

    def start(
        self,
        minimum: int,
        steps: int = 0,
        version: int = 4,
        recovery: Literal["restart", "in_process"] | None = None,
        epochs: int = 6,
        hang_timeout: timedelta | Literal["auto"] = "auto",
        **timings: float,
    ) -> None:
        """Start the nodes, with so many steps of a plain script, or one that opens a session and then recovers so."""
        rendezvous = TableRendezvous(
            endpoint=self.azurite.endpoint,
            port_range=PORTS,
            advertise=f"{self.subnet}.0/24" if version == 4 else f"fd00:{self.id}::/64",
            timings=RendezvousTimings(**timings),
        )
        plan = Plan(
            resources=ElasticResources(min_instance_count=minimum, max_instance_count=len(NODES)),
            distribution=ElasticDistribution(
                process_count_per_instance=1, recovery=recovery or "restart", newcomer_timeout=timedelta(0)
            ),
            rendezvous=rendezvous,
            health=HealthPolicy(hang_timeout=hang_timeout),
            name="run",
        )
        with self._starting.gathering():
            # The last one first: the health check of the node that is cut off must not find a round.
            for number, name in reversed(list(enumerate(NODES))):
                self.within(name, "ip", "addr", "add", f"fd00:{self.id}::{number + 1}/64", "dev", "eth0", "nodad")
                environment = {
                    **os.environ,
                    variables.PLAN: plan.to_json(),
                    variables.NODE_ID: name,
                    variables.RUN_DIR: str(self.folder),
                    variables.SCHEDULED_EVENTS: "",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",  # as in local clusters, whose fork server this is
                }
                plain = ["stepping.py", str(steps), str(self.folder / "progress"), str(self._go)]
                session = ["chaos_train.py", "--epochs", str(epochs), "--full", "3"]
                program, *arguments = plain if recovery is None else session
                command = [*NODE_COMMAND, "--", "python", str(PROGRAMS / program), *arguments]
                self._nodes[name] = self._processes.start(name, command, environment)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def worlds(self, name: str) -> list[int]:
        return [int(size) for size in re.findall(r"world (\d+)", self.log(name))]

    def events(self, kind: type, node: str) -> list:
        return [
            event for event in read_events(self.folder / "events") if isinstance(event, kind) and event.node == node
        ]

    def reopened(self) -> list:
        return [event for name in NODES for event in self.events(RoundReopened, name)]

    def until(self, condition, timeout: float = 150.0) -> None:
        limit = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < limit, "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in NODES)
            time.sleep(0.1)

    def wait(self) -> dict[str, int | None]:
        """Let the run end once its steps are done, and return the nodes' exit codes."""
        self._go.touch()
        self.until(lambda: all(node.exit_code() is not None for node in self._nodes.values()))
        return {name: node.exit_code() for name, node in self._nodes.items()}

    def reported_after(self, node: str, peer: str) -> float:
        """Return the seconds from this node's start of joining until it reported that it cannot reach the other one."""
        (event, *_) = [event for event in self.events(Unreachable, node) if event.peer == peer]
        assert event.host == self.addresses[node]
        assert event.address.startswith(f"{self.addresses[peer]}:")
        assert PORTS[0] <= int(event.address.rpartition(":")[2]) <= PORTS[1]
        line = f"{node} ({event.host}) cannot reach {peer} ({event.address}), {event.purpose}: {event.error}. Nodes in"
        assert line in self.log(node)
        checked = max(each.time for each in self.events(HealthChecked, node))
        entered = [each.time for each in self.events(RoundEntered, NODES[0])]
        return event.time - max(checked, min(entered, default=checked))


@pytest.fixture
def network(tmp_path, request):
    with Network(tmp_path, getattr(request, "param", FORKED)) as made:
        yield made


@pytest.mark.parametrize(("network", "version"), [(NodeStart(), 4), (FORKED, 6)], indirect=["network"])
def test_nodes_that_reach_each_other_train_on_the_ports_of_the_range(network, version):
    network.start(minimum=3, steps=40, version=version)
    network.until(lambda: all(network.worlds(name) == [3] for name in NODES))
    listening = network.within("node-a", "ss", "-Htln") if shutil.which("ss") else ""
    assert network.wait() == dict.fromkeys(NODES, 0)
    assert int((network.folder / "progress").read_text()) >= 40
    assert "cannot reach" not in "".join(map(network.log, NODES))
    if listening:
        agents = {int(line.split()[3].rpartition(":")[2]) for line in listening.splitlines()}
        assert len([port for port in agents if PORTS[0] <= port <= PORTS[1]]) >= 2, "the hub and the store"


def test_a_node_that_is_cut_off_is_left_out_and_says_why_until_the_network_is_mended(network):
    network.separate("node-c", "node-a", "node-b")
    network.start(minimum=2, steps=40)
    network.until(lambda: network.events(Unreachable, "node-c") and "node-c" in network.log("node-a"))
    network.until(lambda: network.worlds("node-a") == network.worlds("node-b") == [2])
    assert network.worlds("node-c") == []
    assert network.reported_after("node-c", "node-a") < REPORTED_WITHIN_S
    network.join("node-c", "node-a", "node-b")
    network.until(lambda: network.worlds("node-c") == [3])


def test_below_the_minimum_the_run_fails_and_every_node_says_who_cannot_reach_whom(network):
    network.separate("node-c", "node-a", "node-b")
    network.start(minimum=3, steps=40, max_failed_rounds=3)
    assert network.wait() == dict.fromkeys(NODES, 1)
    assert network.reported_after("node-c", "node-a") < REPORTED_WITHIN_S
    for name in NODES:
        (message,) = re.findall(r"^error: (.*)$", network.log(name), re.MULTILINE)
        assert message.startswith("3 rounds in a row broke because nodes could not reach each other")
        assert re.search(r"(node-c .* cannot reach node-[ab]|node-[ab] .* cannot reach node-c) \(", message)
        assert f"open TCP ports {PORTS[0]}-{PORTS[1]} between them" in message


def pair_is_named(network: Network) -> bool:
    """Return whether one of the two, node-b and node-c, was the first to report the other one."""
    pairs = {(event.node, event.peer) for name in NODES for event in network.events(Unreachable, name)}
    return bool(pairs) and pairs <= {("node-b", "node-c"), ("node-c", "node-b")}


def test_of_two_that_do_not_reach_each_other_one_waits_until_they_do(network):
    network.separate("node-b", "node-c")
    network.start(minimum=2, steps=40)
    network.until(lambda: network.worlds("node-a")[-1:] == [2])
    assert pair_is_named(network)
    assert any(" cannot reach " in event.reason for event in network.reopened())
    network.join("node-b", "node-c")
    network.until(lambda: network.worlds("node-a")[-1:] == [3])
    assert network.wait() == dict.fromkeys(NODES, 0)


@pytest.mark.parametrize("steps", [0, 40], ids=["session", "plain"])
def test_two_below_the_minimum_end_the_run_although_their_workers_would_hang(network, steps):
    network.separate("node-b", "node-c")
    network.start(minimum=3, steps=steps, recovery=None if steps else "restart", max_failed_rounds=2)
    assert network.wait() == dict.fromkeys(NODES, 1)
    assert not (network.folder / "progress").exists()
    for name in NODES:
        (message,) = re.findall(r"^error: (.*)$", network.log(name), re.MULTILINE)
        assert message.startswith("2 rounds in a row broke because nodes could not reach each other")
        assert re.search(r"node-[bc] \([\d.]+\) cannot reach node-[bc] \(", message)


@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_two_that_are_separated_while_they_train_are_found_when_the_round_hangs(network, both):
    network.start(minimum=2, recovery="in_process", epochs=400, hang_timeout=timedelta(seconds=12))
    network.until(lambda: max((event.step for event in network.events(Progress, "node-a")), default=0) > 10)
    network.separate("node-b", "node-c", both=both)
    network.until(lambda: network.events(RoundEntered, "node-a")[-1].world_size == 2)
    assert network.events(HangDetected, "node-a")
    assert pair_is_named(network)


def test_workers_keep_their_state_where_rank_0_is_lost_to_one_node_and_then_to_the_other(network):
    network.start(minimum=2, recovery="in_process", epochs=400)
    network.until(lambda: max((event.step for event in network.events(Progress, "node-a")), default=0) > 10)
    for other, seconds in (("node-c", 2.5), ("node-b", 10.0)):
        network.cut(other, "node-a")
        time.sleep(seconds)
    for other in ("node-b", "node-c"):
        network.mend(other, "node-a")
    network.until(lambda: all(network.events(RoundEntered, name)[-1].world_size == 3 for name in NODES))
    restored = [event for name in NODES for event in network.events(Restored, name) if event.round > 1]
    assert min(event.step for event in restored) > 10, restored


def test_hubs_that_members_do_not_need_are_not_missed(network):
    for one, other in (("node-b", "node-c"), ("node-c", "node-b")):
        network.close_ports(one, "-s", network.addresses[other], "--dport", f"{PORTS[0]}:{PORTS[1]}")
    network.start(minimum=3, recovery="in_process", epochs=16)
    assert network.wait() == dict.fromkeys(NODES, 0)
    assert network.reopened() == []


def test_one_that_lets_nobody_in_is_left_out_although_it_reaches_the_others(network):
    network.close_ports("node-a", "--syn", "-i", "eth0")
    network.start(minimum=2, steps=40)
    network.until(lambda: "makes no room for node-a" in network.log("node-a"))
    network.until(lambda: network.events(Unreachable, "node-b") and network.events(Unreachable, "node-c"))
    assert network.wait() == dict.fromkeys(NODES, 0)
    assert network.worlds("node-b")[-1] == 2


def test_ports_that_workers_need_are_missed_by_name_although_the_range_is_open(network):
    for name in NODES:
        network.close_ports(name, "--syn", "-i", "eth0", "!", "--dport", f"{PORTS[0]}:{PORTS[1]}")
    network.start(minimum=3, steps=40, max_failed_rounds=2)
    assert network.wait() == dict.fromkeys(NODES, 1)
    events = network.events(Unreachable, "node-b")
    assert {event.peer for event in events} == {"node-a", "node-c"}
    for event in events:
        assert event.purpose == f"a member of round {event.round}, on a port such as its workers take"
        assert not PORTS[0] <= int(event.address.rpartition(":")[2]) <= PORTS[1]
    assert "NCCL and gloo take any port of net.ipv4.ip_local_port_range" in network.log("node-b")
    assert not (network.folder / "progress").exists()


def test_a_store_that_one_node_cannot_reach_is_noticed_in_seconds(network):
    network.close_ports("node-a", "-s", network.addresses["node-c"], "--dport", f"{PORTS[0] + 1}:{PORTS[1]}")
    network.start(minimum=2, steps=40)
    network.until(lambda: network.events(Unreachable, "node-c") and network.worlds("node-a")[-1:] == [2])
    assert network.wait() == dict.fromkeys(NODES, 0)
    assert network.reported_after("node-c", "node-a") < REPORTED_WITHIN_S
    (event,) = network.events(Unreachable, "node-c")
    assert event.purpose == f"the store of round {event.round}"
    assert network.worlds("node-a")[-1] == 2
    assert network.worlds("node-c") == []
