"""Ports, unreachable pairs of nodes, and what is reported about them, with real sockets."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.node.core.actions import Reopen
from azureml_elastic.node.core.events import Started
from azureml_elastic.node.core.joining import is_leader_unreachable
from azureml_elastic.node.core.node import Node, Part
from azureml_elastic.node.core.round import Limits, Member, NewestRound, Round
from azureml_elastic.node.core.sealing import (
    describe_partitions,
    partitioned_nodes,
    select_members,
)
from azureml_elastic.node.host.addresses import Ports
from azureml_elastic.node.rendezvous import probing
from azureml_elastic.node.rendezvous.context import LocalNode, Runtime
from azureml_elastic.node.rendezvous.link import Assignment, Membership
from azureml_elastic.node.rendezvous.probing import PeerProber, peers_to_probe
from azureml_elastic.node.rendezvous.reachability import (
    Reachability,
    UnreachablePair,
    describe_absence,
    describe_error,
    is_unreachable,
    query_members,
)
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.torchrun import open_store
from azureml_elastic.node.table import open_table
from tests.support.listening import silent_port
from tests.support.rendezvous.hubs import make_context
from tests.support.waiting import until

HERE = "127.0.0.1"


def member(node: str, unreached: tuple[str, ...] = (), **more) -> Member:
    return Member(node, f"i-{node}", round=3, host=f"10.0.0.{node}", hub_port=29400, unreached=unreached, **more)


@pytest.fixture
def free_range():
    """Return a function that finds so many ports in a row which nobody listens on."""

    def find(count: int) -> tuple[int, int]:
        for low in random.Random(time.monotonic_ns()).sample(range(20000, 30000), 1000):
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for port in range(low, low + count):
                    stack.enter_context(socket.create_server(("", port)))
                return low, low + count - 1
        raise AssertionError("no free ports")

    return find


@pytest.fixture
def silent():
    """A port that takes no more connections: who connects gets no answer, as behind a firewall."""
    with silent_port() as port:
        yield port


# --- ports -----------------------------------------------------------------------------------------------------------


def test_a_range_gives_one_port_after_the_other_and_an_error_when_all_are_taken(free_range):
    low, high = free_range(4)
    ports, others = Ports((low, high)), Ports((low, high))
    with contextlib.ExitStack() as stack:
        taken = []
        for each in (ports, ports, others, others):
            listener = stack.enter_context(each.listen(HERE, 5))
            taken.append(listener.getsockname()[1])
        assert taken == [low, low + 1, low + 2, low + 3]
        with pytest.raises(
            UsageError, match=rf"All 4 ports of port_range={low}-{high} are taken.*Each node on a machine needs 3"
        ):
            ports.listen(HERE, 5)
    with ports.listen(HERE, 5) as listener:
        assert listener.getsockname()[1] == low + 2, "the port after the last one, not an earlier one"


def test_an_interface_that_is_not_ours_is_no_port_that_is_taken(free_range):
    with pytest.raises(OSError, match=r"198\.51\.100\.7"):
        Ports(free_range(3)).listen("198.51.100.7", 5)


def test_nodes_of_one_machine_share_a_range_through_many_rounds(tmp_path, free_range):
    low, high = free_range(7)
    table = open_table(TableRendezvous(endpoint=str(tmp_path / "t.sqlite")), "run", NodeEnvironment.read({}))
    nodes = [
        Rendezvous(table, LocalNode(f"node-{k}", HERE, ports=(low, high)), Limits(2, 2), RendezvousTimings())
        for k in range(2)
    ]
    stores = {}
    seen = {node.hub.port for node in nodes}

    def enter(node: Rendezvous) -> Assignment:
        assignment = node.join()
        stores[node.node] = open_store(assignment, timedelta(seconds=20), lambda: False)
        return assignment

    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 8):
            assignments = list(pool.map(enter, nodes))
            assert [assignment.round.number for assignment in assignments] == [number] * 2
            seen |= {assignments[0].store_address[1]}
            stores["node-0"].set("key", str(number))
            assert stores["node-1"].get("key") == str(number).encode()
            assert nodes[0].round_end.write(Reopen("again"))
    assert len(seen) > 3
    assert all(low <= port <= high for port in seen)
    stores.clear()
    for node in nodes:
        node.shutdown()
    table.close()


# --- connecting ------------------------------------------------------------------------------------------------------


def test_many_addresses_are_tried_at_once(silent):
    with socket.create_server((HERE, 0)) as listening, socket.socket() as unused:
        unused.bind((HERE, 0))
        addresses = [
            (HERE, listening.getsockname()[1]),
            (HERE, unused.getsockname()[1]),
            ("no-such-host.invalid", 1),
            *[(HERE, silent)] * 100,
        ]
        began = time.monotonic()
        there, refused, nameless, *silent = Runtime().probe(addresses, 0.5)
        took = time.monotonic() - began
    assert there is None
    assert isinstance(refused, ConnectionRefusedError)
    assert isinstance(nameless, OSError)
    assert all(isinstance(error, TimeoutError) for error in silent)
    assert took < 30
    assert [is_unreachable(error) for error in (refused, silent[0], nameless)] == [False, True, True]


def test_a_connection_that_has_come_about_counts_however_late_it_is_looked_at(monkeypatch):
    look_up = socket.getaddrinfo
    with socket.create_server((HERE, 0)) as listening:

        def look_up_late(host, *more, **named):
            if host == "late":
                listening.accept()[0].close()
            return look_up(HERE, *more, **named)

        monkeypatch.setattr(socket, "getaddrinfo", look_up_late)
        port = listening.getsockname()[1]
        assert Runtime().probe([(HERE, port), ("late", port)], 0.0)[0] is None


def test_the_time_to_connect_begins_when_the_names_are_known(monkeypatch):
    look_up, clock, ahead = socket.getaddrinfo, time.monotonic, 0.0
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind((HERE, 0))
        listener.listen(0)
        filler.connect(listener.getsockname())

        def make_room():
            listener.accept()[0].close()

        room = threading.Timer(0.3, make_room)  # before TCP's second attempt

        def look_up_slowly(*where, **named):
            nonlocal ahead
            ahead += 60
            room.start()
            return look_up(*where, **named)

        monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
        later = SimpleNamespace(monotonic=lambda: clock() + ahead)
        monkeypatch.setattr("azureml_elastic.node.rendezvous.context.time", later)
        assert Runtime().probe([listener.getsockname()], 30) == [None]


def test_errors_are_described():
    assert describe_error(TimeoutError("x"), 5.0) == "connection timed out after 5 s"
    assert describe_error(OSError(113, "No route to host"), 5.0) == "No route to host"
    assert describe_error(socket.gaierror(-2, "Name or service not known"), 5.0).startswith("its name has no address")


@pytest.fixture
def prober():
    """A prober of rank 1 in a round of three nodes of this machine, and its pairs."""
    context = make_context(node="x")
    machine = Node(member("x"), context.limits, context.timings, context.latest)
    pairs: list[UnreachablePair] = []
    reach = Reachability("x", HERE, context.clock, report=pairs.append)
    made = PeerProber(context, reach, Membership(context, machine), machine)
    yield made, reach, pairs
    made.close()


@pytest.mark.parametrize("target", ["store", "hub", "data port"])
def test_a_port_behind_a_firewall_is_given_up_in_seconds_and_named(prober, silent, target):
    probes, reach, pairs = prober
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        store = silent if target == "store" else port
        hub, data = silent if target == "hub" else port, silent if target == "data port" else 0
        first = Member("a", "i-a", host=HERE, hub_port=port, store_port=store)
        round_ = Round(
            3, "sealed", members=(first, member("x"), Member("z", "i-z", host=HERE, hub_port=hub, data_port=data))
        )
        began = time.monotonic()
        texts = probes.reach(round_, 1, lambda: False)
        assert 3.0 <= time.monotonic() - began < 15
        (pair,) = pairs
        assert texts == [str(pair)]
        assert (pair.peer, pair.port) == ("a" if target == "store" else "z", silent)
        assert reach.unreached() == (f"i-{pair.peer}",)
        purposes = {"hub": "to which the workers here connect", "data port": "on a port such as its workers take"}
        assert pair.purpose.endswith(purposes.get(target, "the store of round 3"))


def test_who_was_reached_is_not_probed_again_until_a_round_has_failed(prober, silent):
    probes, _, pairs = prober
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        first = Member("a", "i-a", host=HERE, hub_port=port, store_port=port)
        there = Member("z", "i-z", host=HERE, hub_port=port)
        assert probes.reach(Round(3, "sealed", members=(first, member("x"), there)), 1, lambda: False) == []
        gone = replace(there, hub_port=silent)
        assert probes.reach(Round(4, "sealed", members=(first, member("x"), gone)), 1, lambda: False) == []
        assert probes.reach(Round(4, "sealed", members=(member("x"), gone)), 0, lambda: False) == []
        probes.forget()
        assert probes.reach(Round(5, "sealed", members=(member("x"), gone)), 0, lambda: False) == [str(*pairs)]


def test_probes_end_with_the_round_and_their_result_counts_all_the_same(prober, silent):
    probes, reach, _ = prober
    peer = Member("z", "i-z", host=HERE, hub_port=silent)
    assert probes.reach(Round(3, "sealed", members=(member("x"), peer)), 0, lambda: True) is None
    until(lambda: reach.unreached() == ("i-z",))


def test_a_peer_is_watched_until_it_can_be_reached(prober, silent, monkeypatch):
    monkeypatch.setattr(probing, "_RETRY_SECONDS", (0.05, 0.1))
    probes, reach, _ = prober
    with socket.socket() as listener:
        listener.bind((HERE, 0))  # it refuses, which shows that its machine can be reached
        port = listener.getsockname()[1]
        reach.failed(Member("y", "i-y", host=HERE, hub_port=port), "rank 0", TimeoutError(), 3.0)
        for _ in range(2):
            probes.watch()
        until(lambda: not reach.unreached())


# --- gaps ------------------------------------------------------------------------------------------------------------


def test_an_unreachable_pair_is_reported_once_with_both_names_and_advice(caplog):
    now, reports = [100.0], []
    reach = Reachability("node-x", "10.0.0.4", lambda: now[0], (29400, 29500), reports.append)
    peer = Member("node-y", "y", host="10.0.0.5", hub_port=29401)
    pair = reach.failed(peer, "rank 0 of round 3", TimeoutError(), 5.0)
    (reported,) = caplog.messages
    assert reported == (
        "node-x (10.0.0.4) cannot reach node-y (10.0.0.5:29401), rank 0 of round 3: connection timed out after 5 s. "
        "Nodes in different clusters need one virtual network; open TCP ports 29400-29500 between them, or set "
        "advertise= or port_range= of TableRendezvous (docs/how-to/nodes.md)."
    )
    assert reports == [pair]
    for seconds, count in ((10, 1), (300, 2)):
        now[0] += seconds
        reach.failed(peer, "rank 0 of round 4", TimeoutError(), 5.0)
        assert len(reports) == count
    assert reach.is_hub_unreachable("y")
    assert reach.unreached() == ("y",)
    assert reach.reached("y", "hub")
    assert not reach.reached("y", "hub")
    assert reach.unreached() == ()
    reach.failed(peer, "rank 0 of round 9", TimeoutError(), 5.0)
    assert len(reports) == 3, "a pair that fails again is reported again"


def test_the_row_of_a_node_names_those_that_it_cannot_reach():
    reach = Reachability("node-x", "10.0.0.4", time.monotonic)
    me = member("x")
    assert reach.marked(me) is me
    reach.failed(member("y"), "a member", TimeoutError(), 2.0, target="member")
    assert reach.marked(me).unreached == ("i-y",)
    assert reach.marked(me).reason.startswith("node-x (10.0.0.4) cannot reach y (10.0.0.y:29400), a member")
    reach.failed(member("z"), "the store", TimeoutError(), 3.0, target="store", port=29402)
    assert reach.unreached() == ("i-y", "i-z")
    reach.reached("i-y", "member")
    assert reach.marked(me).unreached == ("i-z",)


def test_addresses_of_version_6_are_put_into_brackets(caplog):
    reach = Reachability("x", "fd00::1", time.monotonic)
    reach.failed(Member("y", "y", host="fd00::2", hub_port=29401), "rank 0", TimeoutError(), 3.0)
    assert "x (fd00::1) cannot reach y ([fd00::2]:29401), rank 0" in caplog.text
    assert "open all TCP ports between them" in caplog.text


def test_the_absence_of_a_member_is_described():
    me, other = member("1"), member("2")
    silent = "2 (10.0.0.2) did not reach 1 (10.0.0.1:29400) within 5 s"
    assert describe_absence(other, None, me, 5.0) == silent
    assert describe_absence(other, other, me, 5.0) == silent
    reason = "2 (10.0.0.2) cannot reach 1 (10.0.0.1:29400), rank 0: x"
    row = member("2", reason=f"{reason}; 2 (10.0.0.2) cannot reach 7 (10.0.0.7:1), rank 0: y")
    assert describe_absence(other, row, me, 5.0) == reason


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([], None),
        ([False], True),
        ([True], False),
        ([None], None),
        ([False, None], None),
        ([False, True], False),
        ([False, False, True], True),
        ([False, None, None], None),
    ],
)
def test_the_majority_decides_whether_rank_0_is_cut_off(answers, verdict):
    assert is_leader_unreachable(answers) is verdict


def test_members_answer_whether_they_have_reached_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.rendezvous.reachability._TIMEOUT_SECONDS", 30.0)
    table = open_table(TableRendezvous(endpoint=str(tmp_path / "t.sqlite")), "run", NodeEnvironment.read({}))
    nodes = [Rendezvous(table, LocalNode(f"node-{k}", HERE), Limits(4, 4), RendezvousTimings()) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assignment, *_ = pool.map(Rendezvous.join, nodes)

    def query() -> list[bool | None]:
        return query_members(nodes[1]._context, assignment.round, "node-1")

    assert query() == [True, True]
    nodes[3].shutdown()
    nodes[0].hub.close()
    limit = time.monotonic() + 60
    while query() != [False, None]:
        assert time.monotonic() < limit
    for node in nodes:
        node.shutdown()
    table.close()


# --- selection of members --------------------------------------------------------------------------------------------

LIMITS = Limits(1, 8)


def names(members) -> list[str]:
    return [each.node for each in members]


@pytest.mark.parametrize(
    ("ranked", "counts", "kept"),
    [
        ([member("a", ("i-b", "i-c")), member("b"), member("c", ("i-a",)), member("d")], {"a": 2}, ["b", "c", "d"]),
        ([member("a"), member("b", ("i-a",)), member("c")], {"b": 1}, ["a", "c"]),
        ([member("a", ("i-gone",)), member("b")], {}, ["a", "b"]),
    ],
    ids=["cut off from all", "the lower rank stays", "from nodes that are not there"],
)
def test_of_nodes_that_do_not_reach_each_other_as_few_as_possible_go(ranked, counts, kept):
    assert partitioned_nodes(ranked) == counts
    assert names(select_members(Round(), ranked, LIMITS)) == kept


def test_the_minimum_comes_before_gaps():
    ranked = [member("a"), member("b", ("i-a",)), member("c")]
    assert names(select_members(Round(), ranked, Limits(3, 8))) == ["a", "c", "b"]
    assert describe_partitions(ranked, {"a", "c"})[0].startswith("without b: ")
    assert describe_partitions([*ranked[:1], member("b", ("i-a",), reason="why"), ranked[2]], {"a", "b", "c"}) == [
        "with b: why"
    ]


nodes = [f"node-{k}" for k in range(7)]
gaps = st.lists(st.tuples(st.sampled_from(nodes), st.sampled_from(nodes)))


@given(gaps=gaps, minimum=st.integers(1, 7), strikes=st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_those_that_are_chosen_reach_each_other_unless_the_minimum_asks_for_more(gaps, minimum, strikes):
    ranked = [
        member(node, tuple(f"i-{peer}" for one, peer in gaps if one == node), strikes=strikes[index])
        for index, node in enumerate(nodes)
    ]
    limits = Limits(minimum, 7, 2)
    taken = select_members(Round(), ranked, limits)
    assert len(taken) >= minimum
    assert len(set(names(taken))) == len(taken)
    bad = {frozenset(pair) for pair in gaps if pair[0] != pair[1]}
    inside = set(names(taken))
    if len(taken) > minimum:
        assert not any(pair <= inside for pair in bad)


@given(size=st.integers(2, 100), rank=st.integers(0, 99), seed=st.integers())
def test_few_members_are_tried_by_everybody_and_of_many_some(size, rank, seed):
    rank %= size
    members = [member(str(number)) for number in range(size)]
    peers = peers_to_probe(members, rank, {"i-0"}, random.Random(seed))
    assert str(rank) not in names(peers)
    assert "0" not in names(peers), "it was reached before"
    assert len(set(names(peers))) == len(peers)
    if size <= 32:
        assert len(peers) == size - 1 - (rank != 0)
    else:
        assert len(peers) <= 9
        following = str((rank + 1) % size)
        assert following in names(peers) or following == "0"


def test_the_row_of_a_node_without_gaps_is_as_short_as_before():
    assert "unreached" not in member("a").to_value()
    with_gap = member("a", ("i-b",))
    assert Member.from_value(with_gap.to_value()) == with_gap


@pytest.mark.parametrize("losses", [0, 1])
def test_members_are_connected_to_again_after_a_loss_as_a_node_that_is_back_may_be_cut_off_from_another(losses):
    machine = Node(member("x"), Limits(1, 3), RendezvousTimings(), NewestRound())
    machine.part, machine.round = Part.FINDING, Round(1, "sealed")
    assert machine.handle(Started(Round(2, losses=losses), {}), 0.0)[0].reaches_again is bool(losses)
