"""Folders of a stack's own checkpoints: only complete ones are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from azureml_elastic.train.integrations.script_loop import state_folders
from azureml_elastic.train.integrations.transformers.attachment import INCOMPLETE, newest, save


def folder(parent, step, *, complete=True):
    made = parent / f"checkpoint-{step}"
    made.mkdir()
    if not complete:
        (made / INCOMPLETE).write_text("")
    return str(made)


def test_the_highest_step_is_the_newest(tmp_path):
    folder(tmp_path, 90)
    expected = folder(tmp_path, 100)
    (tmp_path / "checkpoint-200").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    assert newest(str(tmp_path)) == expected


def test_incomplete_folders_are_no_checkpoints(tmp_path):
    expected = folder(tmp_path, 30)
    folder(tmp_path, 45, complete=False)
    assert newest(str(tmp_path)) == expected


def test_no_folder_at_all(tmp_path):
    assert newest(str(tmp_path)) is None


def trainer(tmp_path):
    return SimpleNamespace(
        _get_output_dir=lambda trial: str(tmp_path),
        state=SimpleNamespace(global_step=45),
        args=SimpleNamespace(should_save=True),
    )


def test_a_folder_is_incomplete_until_it_is_written(tmp_path):
    found = []

    def write():
        (tmp_path / "checkpoint-45" / "model.bin").write_bytes(b"weights")
        found.append(newest(str(tmp_path)))
        return "result"

    assert save(trainer(tmp_path), write) == "result"
    assert found == [None]
    assert newest(str(tmp_path)) == str(tmp_path / "checkpoint-45")


def test_no_rank_goes_on_before_the_folder_is_complete(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(state_folders, "all_arrive", lambda: found.append(newest(str(tmp_path))))
    save(trainer(tmp_path), lambda: None)
    assert found[-1] == str(tmp_path / "checkpoint-45")


def test_a_writer_that_fails_leaves_an_incomplete_folder(tmp_path):
    def write():
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        save(trainer(tmp_path), write)
    assert newest(str(tmp_path)) is None
