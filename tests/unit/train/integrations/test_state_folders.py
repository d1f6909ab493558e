"""Folders of ``Accelerator.save_state``: the position that they hold, and whether they are complete."""

from __future__ import annotations

import pytest

from azureml_elastic.train.integrations.script_loop.state_folders import Place, read, save

PLACE = Place(steps=50, epoch=1, windows=8)


def test_a_folder_holds_its_position(tmp_path):
    assert save(tmp_path, PLACE, lambda: "result", is_main=True) == "result"
    assert read(tmp_path) == Place(50, 1, 8, complete=True)


def test_a_folder_whose_writer_has_failed_is_incomplete(tmp_path):
    def write():
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        save(tmp_path, PLACE, write, is_main=True)
    assert read(tmp_path) == PLACE
    assert not PLACE.complete


def test_a_folder_that_is_written_again_is_incomplete_meanwhile(tmp_path):
    save(tmp_path, PLACE, lambda: None, is_main=True)
    meanwhile = []
    save(tmp_path, PLACE, lambda: meanwhile.append(read(tmp_path)), is_main=True)
    assert meanwhile == [PLACE]


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"steps": 1}'])
def test_a_folder_of_another_writer_has_no_position(tmp_path, text):
    if text is not None:
        (tmp_path / "azureml-elastic.json").write_text(text)
    assert read(tmp_path) is None
