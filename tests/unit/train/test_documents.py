"""State trees and manifests: they are read as they were written, and damage is detected."""

from __future__ import annotations

import collections
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest
from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.checkpoint.storage.storage import FileSum
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointDamaged, UsageError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = st.text() | st.integers() | st.booleans()
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(st.integers() | st.text())
        | st.dictionaries(st.integers(), st.integers()).map(collections.Counter)
    ),
    max_leaves=20,
)


@given(TREES)
def test_a_tree_survives_json(value):
    plain, tensors = tree.split("x", value)
    again = tree.join(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert again == value
    assert type(again) is type(value)


def test_tensors_are_taken_out_and_put_back():
    value = {"a": [torch.ones(2), {"b": torch.zeros(())}], 3: (torch.arange(4),), "nan": math.nan}
    plain, tensors = tree.split("s", value)
    assert set(tensors) == {"s/a/0", "s/a/1/b", "s/3/0"}
    again = tree.join(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert again["a"][0] is value["a"][0]
    assert again[3][0] is value[3][0]
    assert math.isnan(again["nan"])


@pytest.mark.parametrize(
    "value", [{1: torch.zeros(2), "1": torch.ones(2)}, {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}}]
)
def test_tensors_under_alike_keys_have_names_of_their_own(value):
    plain, tensors = tree.split("s", value)
    again = tree.join(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert len(tensors) == 2
    assert str(again) == str(value)


def test_what_needs_pickle_is_refused_by_name():
    with pytest.raises(UsageError, match=r"'s/a/1' holds a .*object"):
        tree.split("s", {"a": [1, object()]})


@pytest.mark.parametrize("plain", [{"$tensor": "gone"}, {"$unknown": []}])
def test_unknown_placeholders_are_damage(plain):
    with pytest.raises(CheckpointDamaged):
        tree.join(plain, {})


def manifest(**changes):
    fields = {
        "directory": str(FolderName(7, 2, "0123abcd")),
        "step": 7,
        "round": 2,
        "world_size": 3,
        "parent": Reference("step-before", 5, "d"),
        "files": {"rank-00000.safetensors": FileSum(10, "aa"), "rank-00001.safetensors": FileSum(3, "bb")},
        "state": {"model": {"w": {"$tensor": "model/w"}}},
        "data": {"epoch": 1},
        "torch": "2.13",
    }
    return Manifest(**{**fields, **changes})


@pytest.mark.parametrize("changes", [{}, {"parent": None, "data": None}, {"state": {"ü": [1.5, None]}}])
def test_a_manifest_survives_its_file(changes, tmp_path):
    written = manifest(**changes)
    (tmp_path / written.directory).mkdir()
    (tmp_path / written.directory / "manifest.json").write_bytes(written.to_bytes())
    read = Manifest.read(LocalStorage(tmp_path), written.directory)
    assert read == written
    assert read.reference == Reference(written.directory, 7, written.digest)


@given(st.data())
def test_every_changed_byte_and_every_cut_is_noticed(data):
    content = manifest().to_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        changed = content[:at]
    else:
        changed = bytearray(content)
        changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointDamaged):
        Manifest.from_bytes(bytes(changed), "here")


def test_a_manifest_in_another_folder_is_refused(tmp_path):
    written = manifest()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "manifest.json").write_bytes(written.to_bytes())
    with pytest.raises(CheckpointDamaged, match="belongs to"):
        Manifest.read(LocalStorage(tmp_path), "elsewhere")


def test_folder_names_sort_by_step_and_tell_their_round():
    names = [FolderName(step, 3, "00000000", kept) for step in (9, 10, 100, 10**9) for kept in (False, True)]
    assert [str(name) for name in names] == sorted(str(name) for name in names)
    assert [FolderName.parse(str(name)) for name in names] == names
    assert FolderName.parse("latest.json") is None
