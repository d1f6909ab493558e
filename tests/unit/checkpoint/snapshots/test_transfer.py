"""A state reaches the ranks that want it: undamaged, from all that hold it, each byte sent once, into place."""

from __future__ import annotations

import itertools
import queue
import resource
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.shard_file import Chunk
from azureml_elastic.checkpoint.load.offers import Kind, Offer
from azureml_elastic.checkpoint.load.reading import targets_for
from azureml_elastic.checkpoint.snapshots import transfer
from azureml_elastic.checkpoint.snapshots.copies import Copy, open_source
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.checkpoint.snapshots.transfer import HeldChunks, Region, cut, route
from azureml_elastic.errors import CheckpointDamaged, CheckpointError
from tests.support.shards import TENSORS

LIMIT_S = 20


class Links:
    """Threads as ranks: each pair has queues, of tensors by their numbers. What is sent has left once it is received.

    Args:
        size: number of ranks.
        spoil: function that may change what a rank receives, by sender, receiver, number and bytes.
    """

    def __init__(self, size, spoil=lambda *_: None):
        self.size, self.spoil = size, spoil
        self.meeting = threading.Barrier(size)
        self.values = [None] * size
        self.queues = {}
        self.awaited = {}
        self.lock = threading.Lock()
        self.sent = Counter()

    def queue(self, *key):
        with self.lock:
            return self.queues.setdefault(key, queue.Queue())

    def posted(self, *key):
        with self.lock:
            return self.awaited.setdefault(key, threading.Event())

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
        posted = self.links.posted(self.rank, rank, number)

        def leave():
            assert posted.wait(LIMIT_S), f"piece {number} does not leave rank {self.rank}"

        return Later(leave)

    def receive(self, tensor, rank, number):
        self.links.posted(rank, self.rank, number).set()

        def arrive():
            tensor.copy_(self.links.queue(rank, self.rank, number).get(timeout=LIMIT_S))
            self.links.spoil(rank, self.rank, number, tensor)

        return Later(arrive)


class Later:
    def __init__(self, action):
        self.wait = action


def read(rank, holders, tensors, apart=(), targets=lambda _: {}):
    """Return the tensors of a whole state by name on a rank; the first holder is the main one."""
    offers = [Offer(Kind.WHOLE, 7, 1, "", 1, number, holder) for number, holder in enumerate(holders)]
    held = Snapshot(7, {"model": None}, None, apart=[*apart], tensors=local_chunks(tensors))
    source = open_source(
        offers, [Copy(each, lambda: held, 1, None) for each in offers if each.holder == rank.rank], rank
    )
    assert source.content.header() == held.header()
    if rank.rank in holders:
        source.send(rank)
        return tensors
    return source.read(targets(source.state), rank)


def run(size, holders, *, tensors=TENSORS, apart=(), targets=lambda _: {}, spoil=lambda *_: None, own=None):
    """Return what each rank has afterwards, and the links; ``own`` is the state of a holder, by its rank."""
    links = Links(size, spoil)

    def one(rank):
        return read(Rank(links, rank), holders, (own or {}).get(rank, tensors), apart, targets)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size))), links


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 304)
    monkeypatch.setattr(transfer, "_SMALL_BYTES", 30)
    monkeypatch.setattr(transfer, "_WINDOW", 3)


def require_equal(found, tensors=TENSORS):
    assert [*found] == [*tensors]
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("size", "holders"), [(2, [0]), (2, [1]), (3, [1, 0]), (4, [2]), (5, [3, 0])])
def test_every_rank_has_the_state_afterwards(size, holders):
    found, _ = run(size, holders)
    for each in found:
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
    found, _ = run(3, [1, 0], tensors=first, apart=["buffer", "count"], own={0: second, 1: first})
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
    same = {name for name in present if found[1][name].data_ptr() == present[name].data_ptr()}
    assert same == {"weights", "large", "strided"}


def test_what_arrives_damaged_is_sent_again_by_another_holder():
    senders = []

    def spoil(sender, receiver, number, content):
        if number == 4:
            senders.append((sender, receiver))
            if sender == 0:
                content[0] ^= 1

    found, _ = run(4, [0, 1], spoil=spoil)
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
        with pytest.raises(CheckpointDamaged, match=r"step 7 .* 1 piece of it") as error:
            read(Rank(links, rank), [0, 1], TENSORS)
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
        with pytest.raises(CheckpointError, match=r"no memory for the state of step 3, 33554432 MiB"):
            targets_for([chunk], {}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(0, 40), max_size=3)))


@settings(max_examples=50)
@given(st.lists(st.tuples(shapes(), st.sets(st.integers(0, 3), min_size=1)), max_size=12), st.integers(1, 4))
def test_pieces_have_every_element_once_and_routes_every_receiver_once(found, receiving):
    chunks = [Chunk.of_whole(str(number), shape, "float32", 4) for number, (shape, _) in enumerate(found)]
    holders = [sorted(ranks) for _, ranks in found]
    receivers = [*range(4, 4 + receiving)]
    whole = [Region(number, (0,) * len(each.sizes), each.sizes) for number, each in enumerate(chunks) if each.nbytes]
    pieces = cut(dict.fromkeys(whole, receivers), chunks, holders)
    covered = [torch.zeros(chunk.sizes) for chunk in chunks]
    for number, piece in enumerate(pieces):
        for region in piece.regions:
            region.of(covered[region.source], (0,) * len(region.sizes)).add_(1)
            assert [*piece.holders] == holders[region.source]
        assert len(piece.regions) == 1 or piece.nbytes <= 304 + 16
        for attempt in range(3):
            first, *others = route(number, piece, attempt)
            assert first in piece.holders
            assert sorted(others) == receivers
    assert all(each.eq(1).all() for each in covered)


@settings(max_examples=25)
@given(st.data())
def test_ranks_that_hold_parts_get_other_parts(data):
    """Rows of a tensor are held by some ranks each, and each rank wants some rows or columns, or nothing."""
    size, rows = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 30))
    whole = torch.arange(rows * 20.0).reshape(rows, 20)
    bounds = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    chunks = [Chunk("x", (a, 0), (b - a, 20), (rows, 20), "float32", 4) for a, b in itertools.pairwise(bounds)]
    holders = [sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))) for _ in chunks]
    wants = [data.draw(st.sampled_from(["rows", "columns", "nothing"])) for _ in range(size)]
    links = Links(size)

    def one(rank):
        own = {chunk: whole[chunk.offsets[0] :][: chunk.sizes[0]] for chunk, by in zip(chunks, holders, strict=True)
               if rank in by}  # fmt: skip
        target = torch.full((rows, 20) if wants[rank] == "rows" else (20, rows), -1.0)
        targets = {"x": target if wants[rank] == "rows" else target.t()}
        HeldChunks(1, chunks, holders, own).read(targets if wants[rank] != "nothing" else {}, Rank(links, rank))
        return targets["x"]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(one, range(size)))
    for tensor, kind in zip(found, wants, strict=True):
        assert torch.equal(tensor, whole) or kind == "nothing"


def test_ranks_that_send_to_each_other_do_not_wait_for_each_other():
    """Rank 0 has much to send, and little of rank 1 to pass on to rank 2, which takes nothing more before that."""
    whole, little = torch.arange(4000.0), 152
    chunks = [Chunk("x", (0,), (little,), (4000,), "float32", 4)]
    chunks.append(Chunk("x", (little,), (4000 - little,), (4000,), "float32", 4))
    held = {1: {chunks[0]: whole[:little]}, 0: {chunks[1]: whole[little:]}, 2: {}}
    links = Links(3)

    def one(rank):
        target = torch.zeros(4000)
        HeldChunks(1, chunks, [[1], [0]], held[rank]).read({"x": target}, Rank(links, rank))
        return target

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(one, range(3)):
            assert torch.equal(found, whole)
