"""Which of the files that a program has looked for are saved, and completely."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.state_lookups import Lookups, record
from azureml_elastic.node.agent.newcomer_watch import SaveWatch
from azureml_elastic.node.agent.saved_files import SavedFiles, Scan, is_state_file, scan, stop_between_saves
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors", True),
        ("PYTORCH_MODEL.BIN", True),
        ("__0_0.distcp", True),
        ("checkpoint_7", True),
        ("events.out.tfevents.1", False),
        ("trainer_state.json", False),
        ("checkpoint.json", False),
        ("model.pt.tmp", False),
        (".model.pt", False),
        ("train.log", False),
    ],
)
def test_logs_and_settings_are_no_state(name, expected):
    assert is_state_file(name) == expected


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lookups(*files: Path, folders: tuple[Path, ...] = ()) -> Lookups:
    return Lookups(frozenset(map(str, files)), frozenset(map(str, folders)))


def test_a_listed_folder_is_searched_for_state_up_to_the_limit(tmp_path):
    out = tmp_path / "out"
    names = ("a.pt", "one/b.pt", "one/two/c.pt", "checkpoint-1/model.safetensors")
    expected = {str(write(out / name)) for name in names}
    for name in ("log.txt", ".git/x.pt", "run/y.pt", "1/2/3/4/deep.pt"):
        write(out / name)
    write(out / "empty.pt", "")
    found = scan(lookups(folders=(out, tmp_path / "missing")), excluded=out / "run")
    assert set(found[str(out)].files) == expected
    assert not found[str(out)].complete
    assert found[str(tmp_path / "missing")] == Scan()


def test_a_file_that_was_looked_for_may_have_any_name_and_a_folder_is_none(tmp_path):
    step, folder, missing = write(tmp_path / "step.txt"), tmp_path / "out", tmp_path / "latest"
    write(folder / "model.pt")
    found = scan(lookups(step, folder, missing))
    assert {path: set(one.files) for path, one in found.items()} == {
        str(step): {str(step)},
        str(folder): set(),
        str(missing): set(),
    }


def test_a_scan_ends_in_a_folder_with_too_many_entries_and_after_its_time(tmp_path):
    for number in range(30):
        write(tmp_path / f"{number}.pt")
    times = iter([0.0, *[1.0] * 10, *[6.0] * 1000])
    (found,) = scan(lookups(folders=(tmp_path,)), clock=lambda: next(times)).values()
    assert len(found.files) == 10
    assert not found.complete


def stamp(changed: int, size: int = 1, inode: int = 1) -> tuple[int, int, int]:
    return changed, size, inode


def seen(files, *, complete: bool = True) -> dict[str, Scan]:
    return {"/out": Scan(files, complete)}


def test_files_count_once_their_folder_is_quiet():
    saved = SavedFiles()
    old = {"/out/old.pt": stamp(1)}
    saved.add(seen(old), 0.0)
    saved.add(seen(old), 10.0)
    assert saved.saved is None
    model = {**old, "/out/checkpoint-1/model.safetensors": stamp(5)}
    saved.add(seen(model), 11.0)
    saved.add(seen(model), 12.5)
    both = {**model, "/out/checkpoint-1/optimizer.pt": stamp(6)}
    saved.add(seen(both), 14.0)  # the checkpoint's second file
    assert saved.saved is None
    saved.add(seen({**both, "/out/growing.bin": stamp(7, 1)}), 15.0)
    assert saved.saved is None
    saved.add(seen({**both, "/out/growing.bin": stamp(8, 2)}), 16.0)  # in another folder
    assert saved.saved is not None
    assert saved.saved.startswith("/out/checkpoint-1/")


@pytest.mark.parametrize(
    "versions",
    [
        [stamp(at, size=100) for at in range(4)],
        [stamp(at, size=100 + at % 2, inode=at) for at in range(4)],
        [stamp(at, size=(100, 100, 60, 100)[at]) for at in range(4)],
        [stamp(0), stamp(1, size=100), None, stamp(3, size=10)],
    ],
    ids=["written over", "moved to its place", "caught half written", "caught empty"],
)
def test_a_program_that_saves_all_the_time_is_seen_as_saving(versions):
    """The version before the one that is written now was complete."""
    saved = SavedFiles()
    for at, version in enumerate(versions[:2]):
        saved.add(seen({"/out/last.pt": version}), at)
    assert saved.saved is None, "the first new version may be incomplete"
    for at, version in enumerate(versions[2:], start=2):
        saved.add(seen({} if version is None else {"/out/last.pt": version}), at)
    assert saved.saved == "/out/last.pt"


def test_a_file_that_only_grows_is_not_saved_until_it_is_quiet():
    saved = SavedFiles()
    for at in range(20):
        saved.add(seen({"/out/last.pt": stamp(at, size=at)}), float(at))
    assert saved.saved is None
    saved.add(seen({"/out/last.pt": stamp(19, size=19)}), 22.0)
    assert saved.saved == "/out/last.pt"


def test_a_path_that_is_looked_for_later_counts_from_then_on():
    """The program has only begun when the first node waits."""
    saved = SavedFiles()
    saved.add({}, 0.0)
    old = {"/out": Scan({"/out/last.pt": stamp(1)})}
    for now in (1.0, 10.0):
        saved.add(old, now)
    assert saved.saved is None


def test_old_files_that_only_a_later_scan_finds_are_not_new():
    saved = SavedFiles()
    saved.add(seen({"/out/1.pt": stamp(50)}, complete=False), 0.0)
    for now in (1.0, 4.0):
        saved.add(seen({"/out/0.pt": stamp(40)}, complete=False), now)
    assert saved.saved is None
    for now in (5.0, 8.0):
        saved.add(seen({"/out/0.pt": stamp(40), "/out/2.pt": stamp(60)}, complete=False), now)
    assert saved.saved == "/out/2.pt"


WRITES = """
import signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
def other():  # it takes no signal: a main thread that reads would not notice
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pause()
threading.Thread(target=other, daemon=True).start()
with open(sys.argv[1], sys.argv[2]):
    print(flush=True)
    sys.stdin.readline()
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("mode", "looked_for", "expected"),
    [("wb", "out/last.pt", False), ("ab", "out", False), ("rb", "out/last.pt", True), ("wb", "ou", True)],
)
def test_a_worker_is_not_ended_while_it_writes_its_state(tmp_path, mode, looked_for, expected):
    path = write(tmp_path / "out" / "last.pt")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    paths, pids = {str(tmp_path / looked_for)}, [process.pid, 2**22 + 1]  # one that has ended
    try:
        process.stdout.readline()
        if not expected:  # it goes on, until it has written
            assert not stop_between_saves(pids, paths)
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
        until(lambda: stop_between_saves(pids, paths))  # a machine may be too busy to stop a process in time
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        process.terminate()
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 7, "its own handler has run"
    finally:
        process.kill()
        process.communicate()


def worker(folder: Path, code: str, watch: SaveWatch) -> subprocess.Popen:
    """Start a worker that notes what it looks for, and watch it."""
    environ = {**os.environ, variables.CHANNEL: str(folder / "agent.sock"), "OUT": str(folder / "out")}
    head = f"import os, sys\nfrom {record.__module__} import record\nrecord(os.environ)\nout = os.environ['OUT']\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    watch.begin([process.pid])
    return process


SAVES = """
print(flush=True)
sys.stdin.readline()
with open(f"{out}/model-1.pt", "w") as file:
    file.write("1")
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("looks", "expected"),
    [("os.listdir(out)", True), ("os.path.isfile(f'{out}/model-1.pt')", True), ("os.path.isdir(out)", False)],
    ids=["lists the folder", "asks for the file", "asks for the folder alone"],
)
def test_a_save_is_one_that_the_program_has_looked_for(tmp_path, looks, expected):
    (tmp_path / "out").mkdir()
    watch = SaveWatch(tmp_path)
    process = worker(tmp_path, f"{looks}\n{SAVES}", watch)
    try:
        if expected:
            until(lambda: watch.lookups != Lookups())
            # The state before the save is known once a scan after that has ended.
            scans = watch.scans
            until(lambda: watch.scans > scans)
            process.stdin.write(b"\n")
            process.stdin.flush()
            until(watch.take_save)
            assert not watch.take_save()
        else:
            until(lambda: watch.scans > 0)
            assert watch.lookups == Lookups()
    finally:
        watch.close()
        process.communicate(b"\n", timeout=60)


class Hanging:
    """A folder on a mount that does not answer until the end of the test."""

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()

    def __truediv__(self, name: str) -> Hanging:
        return self

    def read_bytes(self) -> bytes:
        self.asked.set()
        self.over.wait()
        raise OSError("the mount is gone")


def test_a_mount_that_does_not_answer_holds_nothing_up():
    folder = Hanging()
    watch = SaveWatch(folder)
    watch.begin([1])
    try:
        assert folder.asked.wait(30)
        for _ in range(3):
            assert not watch.take_save()
            watch.pause()
            watch.begin([1])
        assert [thread.name for thread in threading.enumerate()].count("save-watch") == 1
    finally:
        watch.close()
        folder.over.set()
