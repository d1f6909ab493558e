"""What cannot be written is dropped and counted; nothing is raised, and no line is torn for its reader."""

from __future__ import annotations

import errno
import os

from azureml_elastic.ledger.line_file import LineFile
from azureml_elastic.ledger.reading import EventReader, read_samples

LINE = '{"round":1,"step":%d,"done":true}'


def append(file: LineFile, *steps: int) -> None:
    for step in steps:
        file.append(LINE % step)


def test_a_full_disk_drops_lines_and_says_how_many(tmp_path, monkeypatch, caplog):
    file = LineFile(tmp_path / "samples" / "round-1.rank-0.jsonl", "lines of samples")
    append(file, 1)
    write, space = os.write, [20]

    def full(descriptor: int, data: bytes) -> int:
        if not space:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: space.pop()])

    monkeypatch.setattr(os, "write", full)
    append(file, 2, 3, 4)
    monkeypatch.undo()
    append(file, 5)
    file.close()
    append(file, 6)
    lines, torn, dropped = read_samples(tmp_path / "samples")
    assert ([line.step for line in lines], torn, dropped) == ([1, 5], 1, 3)
    assert caplog.text.count("cannot be written") == 1
    assert "3 lines of samples were dropped" in caplog.text


def test_a_folder_that_cannot_be_made_is_made_later(tmp_path, caplog):
    (tmp_path / "events").write_text("in its place")
    file = LineFile(tmp_path / "events" / "node-0.jsonl", "events")
    append(file, 1)
    (tmp_path / "events").unlink()
    append(file, 2)
    file.close()
    reader = EventReader(tmp_path / "events")
    assert reader.read() == []
    assert reader.skipped == 2, "the one that was dropped, and one of a kind that is not known"


def test_what_was_never_written_is_counted_at_the_end(tmp_path, caplog):
    (tmp_path / "full").symlink_to("/dev/full")
    file = LineFile(tmp_path / "full", "events")
    append(file, 1, 2)
    file.close()
    assert "2 events were dropped at the end" in caplog.text
