"""Snapshots: what is written to memory is read back."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from azureml_elastic.checkpoint.format.shard_file import Layout
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.errors import CheckpointDamaged
from tests.support.shards import TENSORS, by_name


def path_of(memory):
    return f"/proc/{os.getpid()}/fd/{memory}"


def test_a_snapshot_is_read_back_from_memory():
    data = {"spec": {"seed": 1}, "epoch": 2, "consumed": 30}
    written = Snapshot(7, {"model": {"a": [1, None, "ü"]}}, data, 1.5, save_pending=True, tensors=local_chunks(TENSORS))
    memory = written.to_memory()
    read = Snapshot.from_memory(path_of(memory))
    os.close(memory)
    assert read.header() == written.header()
    found = by_name(read)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_readers_share_no_memory_with_the_writer_or_each_other():
    source = torch.zeros(1000)
    memory = Snapshot(1, {}, None, tensors=local_chunks({"x": source})).to_memory()
    first, second = Snapshot.from_memory(path_of(memory)), Snapshot.from_memory(path_of(memory))
    source.fill_(1)
    by_name(first)["x"].fill_(2)
    os.close(memory)
    assert by_name(second)["x"].eq(0).all()


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
            Snapshot(1, {}, None, tensors=local_chunks({"x": torch.zeros(1 << 20)})).to_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
