"""The message of a failure is the user's own traceback."""

from __future__ import annotations

from types import SimpleNamespace

from azureml_elastic.node.failures import first_failure, last_error

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: no such file'


def failure(local_rank: int, exitcode: int, timestamp: int) -> SimpleNamespace:
    return SimpleNamespace(
        local_rank=local_rank, exitcode=exitcode, timestamp=timestamp, signal_name=lambda: f"signal {-exitcode}"
    )


def test_the_last_traceback_counts(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_text(f"warning\n{TRACEBACK.replace('ValueError', 'KeyError')}\nmore\n{TRACEBACK}\n")
    assert last_error(path) == TRACEBACK


def test_without_a_traceback_the_last_lines_count(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_text("\n".join(str(line) for line in range(100)))
    assert last_error(path).splitlines() == [str(line) for line in range(70, 100)]


def test_no_file_is_no_message(tmp_path):
    assert last_error(tmp_path / "none") == ""


def test_the_first_failure_wins_and_signals_become_exit_codes(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_text(TRACEBACK)
    failures = {4: failure(0, 1, 20), 5: failure(1, -9, 10)}
    first = first_failure(failures, {0: str(path), 1: str(tmp_path / "none")})
    assert (first.rank, first.exit_code, first.message) == (5, 137, "It ended with signal 9.")
    assert first_failure({4: failures[4]}, {0: str(path)}).message == TRACEBACK


def test_siblings_that_were_ended_with_it_are_not_blamed(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_text(TRACEBACK)
    failures = {0: failure(0, -15, 10), 1: failure(1, 75, 10), 2: failure(2, 1, 10)}
    first = first_failure(failures, {2: str(path)})
    assert (first.rank, first.exit_code, first.message) == (2, 1, TRACEBACK)


def test_of_two_at_once_the_one_that_says_why_is_told(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_text(TRACEBACK)
    assert first_failure({0: failure(0, 1, 10), 1: failure(1, 1, 10)}, {1: str(path)}).rank == 1
