"""Folders of ``Accelerator.save_state``: the position that they hold, and whether they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_elastic.train.integrations.script_loop import state_folders
from azureml_elastic.train.integrations.script_loop.state_folders import Place, read, save, set_aside

PLACE = Place(steps=50, epoch=1, windows=8)


def test_a_folder_holds_its_position(tmp_path):
    assert save(tmp_path, PLACE, lambda: "result", rank=0) == "result"
    assert read(tmp_path) == Place(50, 1, 8, complete=True)


def test_a_folder_whose_writer_has_failed_is_incomplete(tmp_path):
    def write():
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        save(tmp_path, PLACE, write, rank=0)
    assert read(tmp_path) == PLACE
    assert not PLACE.complete


def test_a_folder_that_is_written_again_is_incomplete_meanwhile(tmp_path):
    save(tmp_path, PLACE, lambda: None, rank=0)
    meanwhile = []
    save(tmp_path, PLACE, lambda: meanwhile.append(read(tmp_path)), rank=0)
    assert meanwhile == [PLACE]


def test_no_rank_goes_on_before_the_folder_is_complete(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(state_folders, "all_arrive", lambda: found.append(read(tmp_path)))
    save(tmp_path, PLACE, lambda: None, rank=0)
    assert found[-1].complete


def test_rank_0_may_write_a_folder_alone(tmp_path, monkeypatch):
    """Of data parallelism each rank has the whole state."""
    monkeypatch.setattr(state_folders, "all_arrive", lambda: pytest.fail("another rank is waited for"))
    folder, meanwhile = tmp_path / "step_50", []
    save(folder, PLACE, lambda: meanwhile.append(read(folder)), rank=0, together=False, make=True)
    assert meanwhile == [PLACE]
    assert read(folder).complete


def test_a_folder_that_another_rank_has_begun_is_complete_once_rank_0_has_written_it(tmp_path):
    folder = tmp_path / "step_50"
    for rank, complete in ((1, False), (0, True), (2, True)):
        save(folder, PLACE, (folder / f"random_states_{rank}").touch, rank=rank, together=False, make=True)
        assert read(folder).complete == complete
    assert len(list(folder.iterdir())) == 4
    assert [each.name for each in tmp_path.iterdir()] == ["step_50"]


def test_two_ranks_make_a_folder_at_once(tmp_path, monkeypatch):
    folder, rename = tmp_path / "step_50", Path.rename

    def overtaken(self, target):
        monkeypatch.setattr(Path, "rename", rename)
        save(folder, PLACE, (folder / "random_states_1").touch, rank=1, together=False, make=True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    save(folder, PLACE, (folder / "model").touch, rank=0, together=False, make=True)
    assert read(folder).complete
    assert {each.name for each in folder.iterdir()} == {"azureml-elastic.json", "model", "random_states_1"}
    assert [each.name for each in tmp_path.iterdir()] == ["step_50"]


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"steps": 1}'])
def test_a_folder_of_another_writer_has_no_position(tmp_path, text):
    if text is not None:
        (tmp_path / "azureml-elastic.json").write_text(text)
    assert read(tmp_path) is None


def test_a_folder_that_is_made_has_its_position_from_the_beginning(tmp_path):
    folder = tmp_path / "runs" / "step_50"
    meanwhile = []
    save(folder, PLACE, lambda: meanwhile.append(read(folder)), rank=0, make=True)
    assert meanwhile == [PLACE]
    assert [each.name for each in folder.parent.iterdir()] == ["step_50"]
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777


class Killed(BaseException):
    """Ends a process where it is."""


@pytest.mark.parametrize("by_another", [False, True])
def test_a_process_that_is_killed_while_it_makes_a_folder_leaves_nothing(tmp_path, monkeypatch, by_another):
    folder = tmp_path / "step_50"

    def rename(self, target):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(Killed):
            save(folder, PLACE, lambda: None, rank=0, make=True)
    assert not folder.exists()
    if by_another:
        save(folder, PLACE, lambda: None, rank=1, together=False, make=True)
    save(folder, PLACE, lambda: None, rank=0, make=True)
    assert read(folder).complete
    assert [each.name for each in tmp_path.iterdir()] == ["step_50"]


def test_a_script_does_not_find_an_incomplete_folder_again(tmp_path):
    folder = tmp_path / "step_50"
    folder.mkdir()
    assert set_aside(folder, is_main=True).name == "incomplete-step_50"
    assert [each.name for each in tmp_path.glob("step_*")] == []
