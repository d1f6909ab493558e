"""The places of Horovod's workers."""

from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.engines.horovod.rendezvous import Slot, slots_of

COUNTS = st.lists(st.integers(1, 8), min_size=1, max_size=6)


def all_slots(counts):
    return [slot for node in range(len(counts)) for slot in slots_of(node, counts)]


def test_ranks_are_counted_node_by_node():
    assert slots_of(1, [2, 1, 3]) == [Slot(2, 6, 0, 1, 1, 3)]
    assert slots_of(2, [2, 1, 3])[1] == Slot(4, 6, 1, 3, 1, 2)


def test_a_worker_finds_its_place_in_the_environment_and_in_an_answer():
    slot = Slot(4, 6, 1, 3, 1, 2)
    assert slot.response() == b"4,6,1,3,1,2"
    assert slot.variables()["HOROVOD_CROSS_SIZE"] == "2"
    assert len(slot.variables()) == 6


@given(COUNTS)
def test_each_rank_is_given_once_and_cross_ranks_are_complete(counts):
    slots = all_slots(counts)
    assert [slot.rank for slot in slots] == list(range(sum(counts)))
    for local_rank in range(max(counts)):
        across = [slot for slot in slots if slot.local_rank == local_rank]
        assert [slot.cross_rank for slot in across] == list(range(len(across)))
        assert {slot.cross_size for slot in across} == {len(across)}
