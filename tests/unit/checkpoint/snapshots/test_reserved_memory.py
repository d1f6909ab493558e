"""Memory for a hand-over: allocated beforehand, and there in any case."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import closing

import pytest

from azureml_elastic.checkpoint.snapshots import reserved_memory
from azureml_elastic.checkpoint.snapshots.reserved_memory import ReservedMemory

NBYTES = 40 * 4096
PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(reserved_memory, "_PIECE_BYTES", 4096)


def begin(nbytes, available=PLENTY):
    reserved = ReservedMemory()
    reserved.begin(nbytes, available)
    return reserved


def until_allocated():
    for thread in threading.enumerate():
        if thread.name == "reserve-memory":
            thread.join(20)


def take(reserved, nbytes):
    """Return the size of the memory, that of what is allocated, and its content once it is written."""
    memory = reserved.take(nbytes)
    found = os.fstat(memory.descriptor)
    memory.put(0, b"x" * nbytes)
    with closing(os.fdopen(os.dup(memory.descriptor), "rb")) as stream:
        content = os.pread(stream.fileno(), nbytes + 1, 0)
    memory.release()
    return found.st_size, found.st_blocks * 512, content


@pytest.mark.parametrize(("nbytes", "allocated"), [(NBYTES, NBYTES), (4096, 4096), (2 * NBYTES, NBYTES)])
def test_what_is_allocated_is_taken_once(nbytes, allocated):
    reserved = begin(NBYTES)
    until_allocated()
    assert take(reserved, nbytes) == (nbytes, allocated, b"x" * nbytes)
    assert take(reserved, nbytes) == (nbytes, 0, b"x" * nbytes)


def test_who_takes_it_early_waits_for_no_more_than_a_piece():
    reserved = begin(10_000 * 4096)
    size, allocated, content = take(reserved, NBYTES)
    assert (size, content) == (NBYTES, b"x" * NBYTES)
    until_allocated()
    assert allocated <= NBYTES


@pytest.mark.parametrize("available", [0, 4 * NBYTES - 1])
def test_nothing_is_reserved_where_memory_is_scarce(available):
    reserved = begin(NBYTES, available)
    until_allocated()
    assert take(reserved, NBYTES)[1] == 0


def test_memory_that_cannot_be_allocated_is_no_error_before_it_is_needed():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of anonymous memory, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        reserved = begin(NBYTES)
        until_allocated()
        with pytest.raises(OSError, match="too large"):
            reserved.take(NBYTES)
        assert take(reserved, 4096)[0] == 4096
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
