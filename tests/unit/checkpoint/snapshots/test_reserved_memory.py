"""Memory for a hand-over: allocated beforehand, taken once, and of no consequence where it is not there."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from azureml_elastic.checkpoint.snapshots.anonymous_memory import AnonymousMemory
from azureml_elastic.checkpoint.snapshots.reserved_memory import ReservedMemory
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, size_in_memory

PLENTY = 1 << 40
TENSORS = {"weights": torch.randn(300, 500), "strided": torch.arange(12).reshape(3, 4).t(), "step": torch.tensor(3)}


def begin(nbytes, available=PLENTY):
    reserved = ReservedMemory()
    reserved.begin(nbytes, available)
    return reserved


def until_allocated():
    for thread in threading.enumerate():
        if thread.name == "reserve-memory":
            thread.join(20)


def content(memory):
    return Path(f"/proc/{os.getpid()}/fd/{memory.descriptor}").read_bytes()


def test_a_state_in_reserved_memory_is_that_in_fresh_memory():
    snapshot = Snapshot(7, {"model": [1]}, {"epoch": 2}, tensors=TENSORS)
    reserved = begin(size_in_memory(TENSORS))
    until_allocated()
    first, second = snapshot.to_memory(reserved=reserved), snapshot.to_memory(reserved=reserved)
    assert isinstance(second, AnonymousMemory), "what was taken is another's"
    assert not isinstance(first, AnonymousMemory)
    assert content(first) == content(second)


def test_too_little_is_not_taken():
    reserved = begin(4096)
    until_allocated()
    assert isinstance(Snapshot(1, {}, None, tensors=TENSORS).to_memory(reserved=reserved), AnonymousMemory)


def test_who_comes_early_does_not_wait():
    reserved = begin(64 << 20)
    early = reserved.take(1)
    until_allocated()
    assert early is None or early.nbytes >= 64 << 20
    assert reserved.take(1) is None, "it was wanted for the hand-over that is over"


@pytest.mark.parametrize(("available", "there"), [(0, False), (4 * 4096 - 1, False), (4 * 4096, True)])
def test_nothing_is_reserved_where_memory_is_scarce(available, there):
    reserved = begin(4096, available)
    until_allocated()
    assert (reserved.take(4096) is not None) == there


def test_memory_that_cannot_be_allocated_is_no_error():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of anonymous memory, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        reserved = begin(1 << 20)
        until_allocated()
        assert reserved.take(1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
