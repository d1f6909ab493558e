"""The written forms of keys and values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.errors import KeyInvalid, TableError, ValueTooLarge
from azureml_elastic.node.table.keys import key_range, read_key, write_key
from azureml_elastic.node.table.values import (
    MAX_PIECE_CHARACTERS,
    MAX_VALUE_CHARACTERS,
    cut,
    read_value,
    write_value,
)

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(KEYS)
def test_a_written_key_is_plain_and_read_back(key):
    written = write_key(key)
    assert read_key(written) == key
    assert set(written) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._=")


@given(KEYS, KEYS)
def test_the_range_of_a_prefix_holds_exactly_its_keys(key, prefix):
    for start in (prefix, key[: len(prefix)]):
        low, high = key_range(start)
        assert (low <= write_key(key) < high) == key.startswith(start)
    low, high = key_range("")
    assert low <= write_key(key) < high


def test_written_keys_by_example():
    assert write_key("member.node-1_A") == "member.node-1_A"
    assert write_key("a/é%=") == "a=2F=C3=A9=25=3D"
    assert key_range("event/") == ("event=2F", "event=2F~")


def test_the_limits_of_a_key():
    assert write_key("x" * 250) == "x" * 250
    assert len(write_key("é" * 170)) == 1020
    with pytest.raises(KeyInvalid, match=r"251 characters.*at most 250"):
        write_key("x" * 251)
    with pytest.raises(KeyInvalid, match=r"1026 characters.*at most 1024"):
        write_key("é" * 171)
    with pytest.raises(KeyInvalid, match="empty"):
        write_key("")


@pytest.mark.parametrize("written", ["", "a b", "=2f", "=2", "=FF", "~", "a%20"])
def test_foreign_keys_are_refused(written):
    with pytest.raises(KeyInvalid, match="not an encoded key"):
        read_key(written)


@given(st.dictionaries(st.text(), JSON), st.integers(1, 50))
def test_a_value_is_read_back_from_its_pieces(value, size):
    text = write_value("key", value)
    pieces = list(cut(text, size))
    assert text.isascii()
    assert all(0 < len(piece) <= size for piece in pieces)
    assert read_value("key", "".join(pieces)) == value


def test_the_limit_of_a_value():
    room = MAX_VALUE_CHARACTERS - len(json.dumps({"t": ""}, separators=(",", ":")))
    pieces = list(cut(write_value("key", {"t": "x" * room})))
    assert [len(piece) for piece in pieces[:-1]] == [MAX_PIECE_CHARACTERS] * (len(pieces) - 1)
    with pytest.raises(ValueTooLarge, match="'key' takes 921,602 bytes"):
        write_value("key", {"t": "x" * (room + 1)})


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"x"', "null"])
def test_values_of_another_writer(text):
    with pytest.raises(TableError, match=r"'key'.*not a JSON object"):
        read_value("key", text)
