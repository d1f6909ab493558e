"""A state reaches the ranks that lack it: undamaged, from all that hold it, each byte sent once, into place."""

from __future__ import annotations

import queue
import resource
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.write_plan import Chunk
from azureml_elastic.checkpoint.snapshots import transfer
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot
from azureml_elastic.checkpoint.snapshots.transfer import cut, route, send_to_others
from azureml_elastic.errors import CheckpointDamaged, CheckpointError

LIMIT_S = 20
TENSORS = {
    "nothing first": torch.empty(0),
    "weights": torch.randn(30, 5),
    "half": torch.randn(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
    "strided": torch.arange(12).reshape(3, 4).t(),
    "large": torch.arange(1000.0),
    "last": torch.randn(2, dtype=torch.float64),
}


class Links:
    """Threads as ranks: each pair has queues, of tensors by their numbers.

    Args:
        size: number of ranks.
        spoil: function that may change what a rank receives, by sender, receiver, number and bytes.
    """

    def __init__(self, size, spoil=lambda *_: None):
        self.size, self.spoil = size, spoil
        self.meeting = threading.Barrier(size)
        self.values = [None] * size
        self.queues = {}
        self.lock = threading.Lock()
        self.sent = Counter()

    def queue(self, *key):
        with self.lock:
            return self.queues.setdefault(key, queue.Queue())

    def exchange(self, rank, value):
        self.values[rank] = value
        self.meeting.wait(LIMIT_S)
        values = list(self.values)
        self.meeting.wait(LIMIT_S)
        return values


class Rank:
    def __init__(self, links, rank):
        self.links, self.rank, self.world_size = links, rank, links.size

    def from_rank(self, source, value):
        return self.links.exchange(self.rank, value)[source]

    def gather(self, value):
        return self.links.exchange(self.rank, value)

    def send(self, tensor, rank, number):
        self.links.queue(self.rank, rank, number).put(tensor.clone())
        with self.links.lock:
            self.links.sent[self.rank] += tensor.numel()
        return Later(lambda: None)

    def receive(self, tensor, rank, number):
        def arrive():
            tensor.copy_(self.links.queue(rank, self.rank, number).get(timeout=LIMIT_S))
            self.links.spoil(rank, self.rank, number, tensor)

        return Later(arrive)


class Later:
    def __init__(self, action):
        self.wait = action


def run(size, holders, *, tensors=TENSORS, shared=None, targets=lambda _: {}, spoil=lambda *_: None, own=None):
    """Return what each rank has afterwards, and the links; ``own`` is the state of a holder, by its rank."""
    links = Links(size, spoil)

    def one(rank):
        state = (own or {}).get(rank, tensors)
        held = Snapshot(7, {"model": None}, None, tensors=state) if rank in holders else None
        return send_to_others(held, Rank(links, rank), holders, shared or set, targets)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size))), links


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 304)
    monkeypatch.setattr(transfer, "_WINDOW", 3)


def require_equal(found, tensors=TENSORS):
    assert [*found.tensors] == [*tensors]
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(("size", "holders"), [(2, [0]), (2, [1]), (3, [1, 0]), (4, [2]), (5, [3, 0])])
def test_every_rank_has_the_state_afterwards(size, holders):
    found, _ = run(size, holders)
    for each in found:
        assert each.header() == found[holders[0]].header()
        require_equal(each)


def test_holders_share_the_work_and_receivers_pass_on_what_they_have():
    tensors = {"large": torch.arange(30 * 76.0)}
    _, links = run(5, [0, 1, 2], tensors=tensors)
    total = tensors["large"].nbytes
    assert links.sent[0] == links.sent[1] == links.sent[2] == total / 3
    assert links.sent[3] + links.sent[4] == total


def test_what_differs_between_ranks_comes_from_the_first_holder_alone():
    first = {"weight": torch.zeros(1000), "buffer": torch.full((1000,), 1.0), "count": torch.tensor(1)}
    second = {"weight": torch.zeros(1000), "buffer": torch.full((1000,), 2.0), "count": torch.tensor(2)}
    found, _ = run(3, [1, 0], tensors=first, shared=lambda _: {"weight"}, own={0: second, 1: first})
    require_equal(found[2], first)


def test_bytes_arrive_in_the_tensors_that_are_there_and_in_new_ones_where_they_do_not_fit():
    present = {
        "weights": torch.zeros(30, 5),
        "large": torch.zeros(1000, requires_grad=True),
        "half": torch.zeros(8, dtype=torch.bfloat16),
        "last": torch.zeros(2),
        "strided": torch.zeros(3, 4, dtype=torch.int64).t(),
    }
    found, _ = run(2, [0], targets=lambda state: present if state == {"model": None} else {})
    require_equal(found[1])
    same = {name for name in present if found[1].tensors[name].data_ptr() == present[name].data_ptr()}
    assert same == {"weights", "large"}


def test_what_arrives_damaged_is_sent_again_by_another_holder():
    senders = []

    def spoil(sender, receiver, number, content):
        if number == 4:
            senders.append((sender, receiver))
            if sender == 0:
                content[0] ^= 1

    found, _ = run(4, [0, 1], shared=set, spoil=spoil)
    for each in found:
        require_equal(each)
    assert {sender for sender, _ in senders} >= {0, 1}


def test_damage_on_the_way_between_two_receivers_is_noticed():
    damaged = []

    def spoil(sender, receiver, number, content):
        if sender > 0 and not damaged:
            damaged.append((sender, receiver, number))
            content[-1] ^= 128

    found, _ = run(3, [0], spoil=spoil)
    assert damaged
    for each in found:
        require_equal(each)


def test_lasting_damage_is_an_error_on_all_ranks():
    def spoil(_, __, number, content):
        if number == 2:
            content[0] ^= 1

    errors = []

    def one(links, rank):
        held = Snapshot(7, {}, None, tensors=TENSORS) if rank < 2 else None
        with pytest.raises(CheckpointDamaged, match=r"step 7 .* 1 piece of it") as error:
            send_to_others(held, Rank(links, rank), [0, 1], set, lambda _: {})
        errors.append(error)

    links = Links(3, spoil)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: one(links, rank), range(3)))
    assert len(errors) == 3


def test_a_state_without_memory_for_it_is_a_clear_error():
    chunk = Chunk.of_whole("x", (1 << 45,), "uint8", 1)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 44, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"no memory for the state of step 3 .* 33554432 MiB"):
            transfer._placed([chunk], {}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_pieces_have_every_byte_once_and_routes_every_receiver_once(sizes, holding, receiving):
    chunks = [Chunk.of_whole(str(number), (size,), "uint8", 1) for number, (size, _) in enumerate(sizes)]
    shared = {str(number) for number, (_, each) in enumerate(sizes) if each}
    pieces = cut(chunks, shared)
    covered = Counter()
    for piece in pieces:
        assert {chunk.name in shared for chunk in piece.chunks} == {piece.shared}
        for chunk in piece.chunks:
            covered[chunk.name] += piece.end - piece.begin if len(piece.chunks) == 1 else chunk.nbytes
    assert covered + Counter() == Counter({chunk.name: chunk.nbytes for chunk in chunks}) + Counter()
    holders, receivers = [*range(holding)], [*range(holding, holding + receiving)]
    for number, piece in enumerate(pieces):
        for attempt in range(3):
            first, *others = route(number, piece, holders, receivers, attempt)
            assert first in (holders if piece.shared else holders[:1])
            assert sorted(others) == receivers
