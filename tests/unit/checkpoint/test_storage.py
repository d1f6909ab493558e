"""Storages write each file once and verify it; retention keeps the right checkpoints."""

from __future__ import annotations

import errno
import os

import fsspec
import pytest

from azureml_elastic.checkpoint.format.manifest import (
    COMMITTED,
    MANIFEST,
    FolderName,
    Manifest,
    for_good,
    lineage,
    retire,
)
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.checkpoint.storage.storage import FileSum

# aiohttp warns of the size of uploads by adlfs.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


def overwrite(storage, content):
    """Change the file ``a`` of the folder ``f`` without the storage; ``None`` removes it."""
    if isinstance(storage, LocalStorage):
        path = storage.root / "f" / "a"
        path.unlink() if content is None else path.write_bytes(content)
    else:
        files, root = fsspec.core.url_to_fs(str(storage))
        files.rm_file(f"{root}/f/a") if content is None else files.pipe_file(f"{root}/f/a", content)


def test_written_content_is_read_and_verified(storage):
    storage.make("f")
    content = os.urandom(20_000_003)  # more than two blocks
    sums = storage.write("f", "a", [content[:7], memoryview(content)[7:]])
    assert sums.size == len(content) == storage.size("f", "a")
    assert storage.read("f", "a") == content
    assert storage.problem("f", "a", sums) is None
    part = bytearray(9_000_000)
    with storage.reading("f", "a") as fill:
        fill(5, memoryview(part))
    assert part == content[5:9_000_005]
    storage.publish("f", "m", b"manifest")
    storage.write("f", "empty", [])
    assert storage.files("f") == {"a": len(content), "m": 8, "empty": 0}
    assert storage.folders() == ["f"]
    storage.remove("f", "m")
    assert storage.folders() == []
    assert storage.problem("f", "a", sums) is not None


def test_a_file_is_never_written_twice(storage):
    storage.make("f")
    storage.write("f", "a", [b"x"])
    with pytest.raises(FileExistsError):
        storage.write("f", "a", [b"y"])
    assert storage.read("f", "a") == b"x"


def test_a_write_that_fails_leaves_nothing(storage):
    storage.make("f")

    def blocks():
        yield b"x" * 100
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        storage.write("f", "a", blocks())
    assert storage.files("f") == {}


@pytest.mark.parametrize("damage", ["bit", "short", "long", "gone"])
def test_damage_is_named(storage, damage):
    storage.make("f")
    content = b"0123456789" * 1000
    sums = storage.write("f", "a", [content])
    changed = {"bit": content.replace(b"5", b"4", 1), "short": content[:-1], "long": content + b"x", "gone": None}
    overwrite(storage, changed[damage])
    assert "f/a" in storage.problem("f", "a", sums)


def test_reading_beyond_the_end_is_an_error(storage):
    storage.make("f")
    storage.write("f", "a", [b"12345"])
    with storage.reading("f", "a") as fill, pytest.raises(OSError, match=r"ends at byte 5|f/a"):
        fill(3, memoryview(bytearray(3)))


def test_a_file_beside_the_folders_is_replaced(storage):
    storage.make("")
    for content in (b"one", b"two"):
        storage.replace("latest.json", content)
        assert storage.read("", "latest.json") == content
    assert storage.folders() == []


def test_missing_folders_and_files_are_empty(storage):
    assert storage.folders() == []
    assert storage.files("f") == {}
    assert storage.size("f", "a") is None
    with pytest.raises(FileNotFoundError):
        storage.read("", "latest.json")


def committed(storage, step, parent, *, number=1, kept=False):
    name = str(FolderName(step, number, "0" * 8, kept))
    manifest = Manifest(
        directory=name,
        step=step,
        round=number,
        world_size=1,
        parent=None if parent is None else parent.reference,
        files={"a": FileSum(1, "x")},
        state={},
        data=None,
        torch="2",
    )
    storage.make(name)
    storage.publish(name, MANIFEST, manifest.to_bytes())
    storage.write(name, COMMITTED, [])
    return manifest


def test_retention_removes_old_checkpoints_and_attempts_but_nothing_of_newer_rounds(storage):
    line = []
    for step in (10, 20, 30, 40):
        line.append(committed(storage, step, line[-1] if line else None, kept=step == 10))
    for name in (FolderName(35, 1, "a" * 8), FolderName(60, 2, "b" * 8)):
        storage.make(str(name))
        storage.write(str(name), "part", [b"x"])
    storage.make("something else")
    storage.write("something else", "x", [b"x"])
    removed = retire(storage, line[-1], 2)
    assert removed == [line[1].directory, str(FolderName(35, 1, "a" * 8))]
    assert [manifest.step for manifest in lineage(storage, line[-1])] == [40, 30]
    assert set(storage.folders()) == {
        line[0].directory,
        line[2].directory,
        line[3].directory,
        str(FolderName(60, 2, "b" * 8)),
        "something else",
    }


def test_retention_removes_no_committed_checkpoint_of_another_run(storage):
    others = [committed(storage, step, None, number=0) for step in (5, 99)]
    mine = committed(storage, 10, None)
    mine = committed(storage, 20, mine)
    assert retire(storage, mine, 1) == [str(FolderName(10, 1, "0" * 8))]
    assert {other.directory for other in others} <= set(storage.folders())
    assert sorted(retire(storage, mine, 1, all_runs=True)) == [other.directory for other in others]


def test_a_link_to_another_folder_is_no_checkpoint(tmp_path):
    elsewhere = LocalStorage(tmp_path / "elsewhere")
    precious = committed(elsewhere, 10, None)
    storage = LocalStorage(tmp_path / "run")
    mine = committed(storage, 20, None)
    (storage.root / str(FolderName(15, 1, "c" * 8))).symlink_to(elsewhere.root / precious.directory)
    assert storage.folders() == [mine.directory]
    assert retire(storage, mine, 1, all_runs=True) == []
    assert Manifest.read(elsewhere, precious.directory) == precious


def test_the_first_checkpoint_of_each_interval_is_kept_for_good():
    steps = [90, 100, 110, 190, 230, 240, 520]
    before = [None, *steps[:-1]]
    assert [step for step, last in zip(steps, before, strict=True) if for_good(step, last, 100)] == [100, 230, 520]
    assert not any(for_good(step, None, None) for step in steps)
