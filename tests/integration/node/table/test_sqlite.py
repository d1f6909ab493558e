"""The SQLite backend between processes that race and die."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest

from azureml_elastic.errors import TableNotFound, TableUnavailable
from azureml_elastic.node.table.sqlite import SqliteTable

RACER = """
import sys
from azureml_elastic.errors import RowChanged, RowExists
from azureml_elastic.node.table.sqlite import SqliteTable

path, name, updates = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
table = SqliteTable(path, "elastic", "run")
try:
    table.insert("round", {"by": name})
    print("first", name)
except RowExists:
    pass
etag = None
for number in range(updates):
    key = f"slot.{number}"
    try:
        table.insert(key, {"by": name})
        print("slot", number)
    except RowExists:
        pass
done = 0
while done < updates:
    row = table.get("round")
    try:
        table.replace("round", row.value | {"count": row.value.get("count", 0) + 1}, row.etag)
        done += 1
    except RowChanged:
        pass
table.close()
"""

WRITER = """
import sys
from azureml_elastic.node.table.sqlite import SqliteTable

table = SqliteTable(sys.argv[1], "elastic", "run")
row = table.get("row")
etag = row.etag if row else table.insert("row", {"a": 0, "b": "", "c": 0})
number = table.get("row").value["a"]
while True:
    number += 1
    etag = table.replace("row", {"a": number, "b": "x" * 200_000, "c": number}, etag)
    print(number, flush=True)
"""


@pytest.fixture
def spawn():
    """Start Python processes; none outlives the test."""
    processes = []

    def start(code, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_processes_race_from_the_opening_on_and_exactly_one_wins(tmp_path, spawn):
    path, count, updates = tmp_path / "new" / "table.sqlite", 6, 15
    racers = [spawn(RACER, path, number, updates) for number in range(count)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    lines = Counter()
    for racer in racers:
        output, _ = racer.communicate(timeout=300)
        assert racer.returncode == 0
        lines.update(output.splitlines())
    firsts = [line for line in lines if line.startswith("first")]
    assert len(firsts) == 1
    assert {f"slot {number}": 1 for number in range(updates)} == {k: n for k, n in lines.items() if k not in firsts}
    table = SqliteTable(path, "elastic", "run")
    assert table.get("round").value == {"by": firsts[0].split()[1], "count": count * updates}
    table.close()


def test_a_process_killed_while_it_writes_leaves_whole_rows_and_no_lock(tmp_path, spawn):
    path = tmp_path / "table.sqlite"
    for round_ in range(1, 5):
        writer = spawn(WRITER, path)
        said = [int(writer.stdout.readline()) for _ in range(round_ * 3)]
        os.kill(writer.pid, signal.SIGKILL)
        said += [int(line) for line in writer.stdout.read().split()]
        writer.wait(300)
        table = SqliteTable(path, "elastic", "run")
        row = table.get("row")
        assert row.value["a"] == row.value["c"] in (said[-1], said[-1] + 1)
        assert len(row.value["b"]) == 200_000
        table.replace("row", row.value, row.etag)
        table.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_the_clock_going_back_turns_no_timestamp_back(tmp_path):
    path = tmp_path / "table.sqlite"
    table = SqliteTable(path, "elastic", "run")
    table.insert("before", {})
    ahead = table.get("before").timestamp.timestamp() + 3600
    with sqlite3.connect(path) as connection:  # as if it had been written when the clock was an hour ahead
        connection.execute("UPDATE clock SET time_us = ?", (int(ahead * 1e6),))
    connection.close()
    table.insert("after", {})
    assert ahead < table.get("after").timestamp.timestamp() < ahead + 1
    table.close()


def test_tables_of_one_file_are_apart(tmp_path):
    one = SqliteTable(tmp_path / "table.sqlite", "one", "run")
    other = SqliteTable(tmp_path / "table.sqlite", "other", "run")
    one.insert("key", {})
    assert other.get("key") is None
    one.close()
    other.close()


def test_files_that_are_no_table(tmp_path):
    text = tmp_path / "text"
    text.write_text("no database, and longer than the head of one " * 40)
    for path in (text, tmp_path, text / "below"):
        with pytest.raises(TableNotFound, match="cannot be opened"):
            SqliteTable(path, "elastic", "run")
    assert text.read_text().startswith("no database")


def test_a_call_after_the_end_is_refused_with_our_error(tmp_path):
    table = SqliteTable(tmp_path / "table.sqlite", "elastic", "run")
    table.close()
    with pytest.raises(TableUnavailable, match="not available"):
        table.get("key")
