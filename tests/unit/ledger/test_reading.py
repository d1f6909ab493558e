"""Event and audit files are read while they are written."""

import json

from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.ledger.events import NodeStarted, Progress
from azureml_elastic.ledger.reading import EventReader, LineReader, read_events, read_samples
from azureml_elastic.ledger.samples import SampleLine


def line(step, node="node-0"):
    return Progress(time=1.0, node=node, round=1, step=step).model_dump_json().encode() + b"\n"


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    path, whole = tmp_path / "node-0.jsonl", line(2)
    path.write_bytes(line(1) + whole[:20])
    reader = EventReader(tmp_path)
    assert [event.step for event in reader.read()] == [1]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(whole[20:])
    assert [event.step for event in reader.read()] == [2]
    assert reader.skipped == 0


def test_the_last_line_of_a_process_that_has_ended_needs_no_line_feed(tmp_path):
    path = tmp_path / "node-0.log"
    reader = LineReader(path)
    path.write_bytes(b"first\nsecond\nkil")
    assert reader.read() == [b"first", b"second"]
    with path.open("ab") as file:
        file.write(b"led")
    assert reader.read(last=True) == [b"killed"]
    assert reader.read(last=True) == []


def test_files_that_appear_later_are_found_and_a_missing_folder_is_empty(tmp_path):
    reader = EventReader(tmp_path / "events")
    assert reader.read() == []
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "node-1.jsonl").write_bytes(line(1, "node-1"))
    assert [event.node for event in reader.read()] == ["node-1"]
    (tmp_path / "events" / "node-0.jsonl").write_bytes(line(2))
    assert [event.node for event in reader.read()] == ["node-0"]


def test_invalid_lines_are_skipped_and_counted(tmp_path):
    future = json.dumps({"kind": "teleported", "time": 1.0, "node": "node-0"}).encode() + b"\n"
    (tmp_path / "node-0.jsonl").write_bytes(line(1) + future + b"\xff\xfe{\n" + b"\n" + line(2))
    reader = EventReader(tmp_path)
    assert [event.step for event in reader.read()] == [1, 2]
    assert reader.skipped == 3


def test_fields_of_later_releases_are_ignored(tmp_path):
    event = {"kind": "node_started", "time": 1.0, "node": "n", "host": "h", "pid": 3, "mood": "good"}
    (tmp_path / "n.jsonl").write_text(json.dumps(event) + "\n")
    assert read_events(tmp_path) == [NodeStarted(time=1.0, node="n", host="h", pid=3)]


@given(st.lists(st.binary(max_size=8).filter(lambda text: b"\n" not in text), max_size=8), st.data())
def test_each_line_is_returned_once_however_it_was_written(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("lines") / "file"
    content = b"".join(text + b"\n" for text in lines)
    reader, found, position = LineReader(path), [], 0
    while position < len(content):
        count = data.draw(st.integers(1, len(content) - position))
        with path.open("ab") as file:
            file.write(content[position : position + count])
        position += count
        found += reader.read()
    assert found == lines


def test_audit_files_of_all_ranks_are_read_and_torn_lines_counted(tmp_path):
    first = json.dumps({"round": 1, "step": 1, "epoch": 0, "of": 5, "ids": [4, 2]})
    (tmp_path / "round-1.rank-0.jsonl").write_text(first + "\n" + first[:17])
    done = '{"round":2,"step":2,"done":true}'
    (tmp_path / "round-2.rank-3.jsonl").write_text(
        '{"round":2,"step":2,"epoch":0,"ids":[]}\n' + done + '\n{"round":2}\n{"dropped":7}\n'
    )
    (tmp_path / "notes.txt").write_text("no audit file")
    lines, torn, dropped = read_samples(tmp_path)
    begun = [SampleLine(1, 1, 0, (4, 2), done=False, of=5), SampleLine(2, 2, 0, (), done=False)]
    assert lines == [*begun, SampleLine(2, 2, -1, (), done=True)]
    assert (torn, dropped) == (2, 7)
