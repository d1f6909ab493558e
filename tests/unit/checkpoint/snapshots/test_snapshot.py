"""The state in memory: what is handed over comes back, and everybody continues from the furthest of all."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.snapshots.snapshot import RecoverableState, Snapshot, choose
from azureml_elastic.errors import CheckpointDamaged

TENSORS = {
    "weights": torch.randn(3, 5),
    "half": torch.randn(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
    "strided": torch.arange(12).reshape(3, 4).t(),
}


def test_a_snapshot_survives_in_memory():
    data = {"spec": {"seed": 1}, "epoch": 2, "consumed": 30}
    written = Snapshot(7, {"model": {"a": [1, None, "ü"]}}, data, 1.5, save_pending=True, tensors=TENSORS)
    descriptor = written.to_memory()
    try:
        read = Snapshot.from_memory(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
    assert read.header() == written.header()
    assert read.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor)


def test_a_copy_in_memory_is_nobody_elses():
    source = torch.zeros(1000)
    descriptor = Snapshot(1, {}, None, tensors={"x": source}).to_memory()
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    first, second = Snapshot.from_memory(path), Snapshot.from_memory(path)
    source.fill_(1)
    first.tensors["x"].fill_(2)
    os.close(descriptor)
    assert second.tensors["x"].eq(0).all()


@pytest.mark.parametrize("content", [b"something else\n", b"azureml-elastic snapshot 1\nwithout an end"])
def test_foreign_memory_is_refused(tmp_path, content):
    path = tmp_path / "memory"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="no state of a worker"):
        Snapshot.from_memory(str(path))


def test_memory_that_cannot_be_had_is_an_error_and_no_signal():

    huge = torch.zeros(1).expand(1 << 46)
    with pytest.raises((OSError, RuntimeError)):
        Snapshot(1, {}, None, tensors={"x": huge}).to_memory()


offers = st.one_of(
    st.none(), st.builds(RecoverableState, step=st.integers(0, 5), round=st.integers(1, 4), rank=st.integers(0, 3))
)


@given(st.lists(offers, min_size=1, max_size=6), st.one_of(st.none(), st.integers(0, 6)))
def test_the_furthest_state_is_chosen(offers, committed):
    source = choose(offers, committed)
    steps = [offer.step for offer in offers if offer is not None]
    if source is None:
        assert not steps or (committed is not None and committed > max(steps))
        return
    chosen = offers[source]
    assert chosen.step == max(steps)
    assert committed is None or committed <= chosen.step
    rivals = [offer for offer in offers if offer is not None and offer.step == chosen.step]
    assert chosen.round == max(offer.round for offer in rivals)
    assert chosen.rank == min(offer.rank for offer in rivals if offer.round == chosen.round)
