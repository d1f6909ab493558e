"""Files of tensors have no gaps and are safetensors files; other content is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from azureml_elastic.checkpoint.format.shard_file import Chunk, Layout, read_header
from azureml_elastic.errors import CheckpointDamaged

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "uint8": 1, "complex128": 16, "float8_e8m0fnu": 1}


@st.composite
def chunks(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    return Chunk(draw(st.text(max_size=5)), offsets, sizes, shape, dtype, DTYPES[dtype])


def filler(content):
    """Return a function that fills memory with parts of the content."""

    def fill(begin, memory):
        memory[:] = content[begin : begin + len(memory)]

    return fill


@given(st.lists(chunks(), max_size=12))
def test_a_layout_is_read_back(wanted):
    layout = Layout.of(wanted)
    assert len(layout.header) % 64 == 0
    assert read_header(filler(layout.header), "here") == (list(layout.entries), None)
    assert sorted(entry.chunk for entry in layout.entries) == sorted(wanted)
    place = len(layout.header)
    for entry in layout.entries:
        assert entry.begin == place
        assert entry.begin % (entry.chunk.itemsize & -entry.chunk.itemsize) == 0 or entry.chunk.nbytes == 0
        place = entry.end
    assert layout.nbytes == place


def test_the_format_is_that_of_safetensors():
    wanted = [
        Chunk("model/w", (0, 0), (2, 3), (2, 3), "float32", 4),
        Chunk("model/e", (4,), (2,), (8,), "int64", 8),
        Chunk("strange", (), (), (), "complex128", 16),
    ]
    layout = Layout.of(wanted)
    content = layout.header + bytes(range(layout.nbytes - len(layout.header)))
    loaded = load(content)
    assert {name: array.shape for name, array in loaded.items()} == {
        "model/w": (2, 3),
        "model/e[4:6]": (2,),
        "strange": (16,),
    }


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"\xff", json.dumps({"__metadata__": {"azureml_elastic": '{"a": [1]}'}}).encode()]
)
def test_other_headers_are_damage(text):
    with pytest.raises(CheckpointDamaged, match=r"header of here"):
        read_header(filler(len(text).to_bytes(8, "little") + text), "here")


@pytest.mark.parametrize("first", [b"", b"\x01", bytes(8), b"\xff" * 8])
def test_other_lengths_are_damage(first):
    with pytest.raises(CheckpointDamaged, match="is no file of tensors"):
        read_header(filler(first), "here")
