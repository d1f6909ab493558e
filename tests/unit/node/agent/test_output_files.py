"""Where programs save, and which of their files are new and complete."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from azureml_elastic.node.agent.newcomer_watch import OutputWatch
from azureml_elastic.node.agent.output_files import SavedFiles, Scan, is_state_file, output_paths, scan


def test_paths_come_from_the_plan_the_environment_and_the_arguments():
    environ = {"AZURE_ML_OUTPUT_model": "/mnt/out", "AZURE_ML_INPUT_data": "/mnt/data", "HOME": "/home/me"}
    arguments = ["--data=/mnt/data/", "--output_dir", "runs/a", "--save=/tmp/m.pt", "hydra.dir=h", "--lr", "..", "/"]
    arguments += ["--mlflow", "https://host/x"]
    found = output_paths(environ, arguments, "/ckpt", Path("/work/job"))
    assert found == tuple(
        map(
            Path,
            [
                "/ckpt",
                "/mnt/out",
                "/work/job/runs/a",
                "/tmp/m.pt",
                "/work/job/hydra.dir=h",
                "/work/job/h",
                "/work/job/outputs",
                "/work/job",
            ],
        )
    )


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


def test_a_scan_finds_state_at_all_depths_up_to_the_limit(tmp_path):
    found = [
        write(tmp_path / "out" / name)
        for name in ("a.pt", "one/b.pt", "one/two/c.pt", "checkpoint-1/model.safetensors")
    ]
    single = write(tmp_path / "single.pth")
    for name in ("out/log.txt", "out/.git/x.pt", "out/run/y.pt", "out/1/2/3/4/deep.pt"):
        write(tmp_path / name)
    write(tmp_path / "out" / "empty.pt", "")
    result = scan([tmp_path / "out", single, tmp_path / "missing"], excluded=tmp_path / "out" / "run")
    assert set(result.files) == {str(path) for path in [*found, single]}
    assert not result.complete


def test_a_scan_ends_in_a_folder_with_too_many_entries_and_after_its_time(tmp_path):
    for number in range(30):
        write(tmp_path / f"{number}.pt")
    times = iter([0.0, *[1.0] * 10, *[6.0] * 1000])
    result = scan([tmp_path], clock=lambda: next(times))
    assert len(result.files) == 10
    assert not result.complete


def stamp(changed: int, size: int = 1) -> tuple[int, int, int]:
    return changed, size, 1


def test_files_count_once_their_folder_is_quiet():
    saved = SavedFiles()
    old = {"/out/old.pt": stamp(1)}
    saved.add(Scan(old), 0.0)
    saved.add(Scan(old), 10.0)
    assert not saved.saved
    model = {**old, "/out/checkpoint-1/model.safetensors": stamp(5)}
    saved.add(Scan(model), 11.0)
    saved.add(Scan(model), 12.5)
    both = {**model, "/out/checkpoint-1/optimizer.pt": stamp(6)}
    saved.add(Scan(both), 14.0)  # the checkpoint's second file
    assert not saved.saved
    saved.add(Scan({**both, "/out/growing.bin": stamp(7, 1)}), 15.0)
    assert not saved.saved
    saved.add(Scan({**both, "/out/growing.bin": stamp(8, 2)}), 16.0)  # in another folder
    assert saved.saved_at == 14.0
    later = {**both, "/out/growing.bin": stamp(8, 2), "/out/checkpoint-2/model.safetensors": stamp(9)}
    for now in (30.0, 31.0, 33.0):
        saved.add(Scan(later), now)
    assert saved.saved_at == 30.0


def test_a_file_that_is_written_again_counts_and_one_that_grows_does_not():
    saved = SavedFiles()
    for now in range(20):
        saved.add(Scan({"/out/last.pt": stamp(now)}), float(now))
    assert not saved.saved
    saved.add(Scan({"/out/last.pt": stamp(19)}), 22.0)
    assert saved.saved


def test_old_files_that_only_a_later_scan_finds_are_not_new():
    saved = SavedFiles()
    saved.add(Scan({"/out/1.pt": stamp(50)}, complete=False), 0.0)
    for now in (1.0, 4.0):
        saved.add(Scan({"/out/0.pt": stamp(40)}, complete=False), now)
    assert not saved.saved
    for now in (5.0, 8.0):
        saved.add(Scan({"/out/0.pt": stamp(40), "/out/2.pt": stamp(60)}, complete=False), now)
    assert saved.saved


class Hanging:
    """A path on a mount that does not answer until the end of the test."""

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()

    def is_dir(self) -> bool:
        self.asked.set()
        self.over.wait()
        raise OSError("the mount is gone")


def test_a_mount_that_does_not_answer_holds_nothing_up():
    path = Hanging()
    watch = OutputWatch([path])
    watch.begin()
    try:
        assert path.asked.wait(30)
        for _ in range(3):
            assert not watch.saved
            watch.pause()
            watch.begin()
        assert [thread.name for thread in threading.enumerate()].count("output-watch") == 1
    finally:
        watch.close()
        path.over.set()


def test_the_watch_finds_a_new_checkpoint_and_forgets_it_for_the_next_round(tmp_path):
    write(tmp_path / "checkpoint-1" / "model.pt")
    watch = OutputWatch([tmp_path])
    watch.begin()
    try:
        time.sleep(0.5)  # longer than the first scan
        write(tmp_path / "checkpoint-2" / "model.pt")
        until = time.monotonic() + 30
        while not watch.saved:
            assert time.monotonic() < until
            time.sleep(0.05)
        watch.begin()
        assert not watch.saved
    finally:
        watch.close()
