"""Snapshots: what is written to memory is read back, and all ranks continue from the furthest state."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.shard_file import Layout
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


def path_of(memory):
    return f"/proc/{os.getpid()}/fd/{memory.descriptor}"


def test_a_snapshot_is_read_back_from_memory():
    data = {"spec": {"seed": 1}, "epoch": 2, "consumed": 30}
    written = Snapshot(7, {"model": {"a": [1, None, "ü"]}}, data, 1.5, save_pending=True, tensors=TENSORS)
    memory = written.to_memory()
    read = Snapshot.from_memory(path_of(memory))
    memory.release()
    assert read.header() == written.header()
    assert read.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor)


def test_readers_share_no_memory_with_the_writer_or_each_other():
    source = torch.zeros(1000)
    memory = Snapshot(1, {}, None, tensors={"x": source}).to_memory()
    first, second = Snapshot.from_memory(path_of(memory)), Snapshot.from_memory(path_of(memory))
    source.fill_(1)
    first.tensors["x"].fill_(2)
    memory.release()
    assert second.tensors["x"].eq(0).all()


def test_a_copy_is_made_into_what_is_there_and_outlives_what_is_written_to_the_memory_next():
    memory = Snapshot(
        1, {}, None, tensors={"x": torch.zeros(1000), "y": torch.zeros(7), "z": torch.ones(())}
    ).to_memory()
    present = {"x": torch.full((1000,), 9.0), "y": torch.full((8,), 9.0)}
    copied = Snapshot.from_memory(path_of(memory)).copied_into(present)
    for begin in range(0, os.fstat(memory.descriptor).st_size, 100):
        os.pwrite(memory.descriptor, b"\xff" * 100, begin)
    memory.release()
    assert copied.tensors["x"] is present["x"]
    assert [float(each.sum()) for each in copied.tensors.values()] == [0, 0, 1]
    assert present["y"].eq(9).all()


@pytest.mark.parametrize(
    "content",
    [b"something else\n", b"\x08" + bytes(7) + b"no JSON!", Layout.of([]).header, Layout.of([], "{}").header],
    ids=["text", "no header", "no note", "no fields"],
)
def test_other_content_is_refused(tmp_path, content):
    path = tmp_path / "memory"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=str(path)):
        Snapshot.from_memory(str(path))


def test_too_large_a_snapshot_raises_an_error_instead_of_a_signal():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of anonymous memory, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            Snapshot(1, {}, None, tensors={"x": torch.zeros(1 << 20)}).to_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


states = st.one_of(
    st.none(), st.builds(RecoverableState, step=st.integers(0, 5), round=st.integers(1, 4), rank=st.integers(0, 3))
)


@given(st.lists(states, min_size=1, max_size=6), st.one_of(st.none(), st.integers(0, 6)))
def test_the_furthest_state_is_chosen(states, committed):
    source = choose(states, committed)
    steps = [state.step for state in states if state is not None]
    if source is None:
        assert not steps or (committed is not None and committed > max(steps))
        return
    chosen = states[source]
    assert chosen.step == max(steps)
    assert committed is None or committed <= chosen.step
    rivals = [state for state in states if state is not None and state.step == chosen.step]
    assert chosen.round == max(state.round for state in rivals)
    assert chosen.rank == min(state.rank for state in rivals if state.round == chosen.round)
