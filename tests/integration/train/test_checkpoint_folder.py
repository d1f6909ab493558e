"""Checkpoint folders that cannot be used: refused at the start, and tolerated for a while in the middle of a run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from azureml_elastic import train
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointError, UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from tests.support.node_server import run_script
from tests.support.train import workers
from tests.support.waiting import until


def a_file(folder):
    (folder / "taken").write_text("")
    return folder / "taken"


def below_a_file(folder):
    return a_file(folder) / "a" / "b"


def a_dangling_link(folder):
    (folder / "link").symlink_to(folder / "gone")
    return folder / "link"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (a_file, r"'\S+/taken' cannot be used: '\S+/taken' is not a folder\. Remove it, or choose another"),
        (below_a_file, r"'\S+/taken/a/b' cannot be used: '\S+/taken' is not a folder\. Remove it"),
        (a_dangling_link, r"'\S+/link' is not a folder"),
        (lambda folder: folder / ("n" * 300), r"its longest name 300; most file systems take 4,095 and 255\. Shorten"),
        (lambda folder: folder / "/".join(["n" * 100] * 60), r"the path has 6,\d\d\d bytes .* Shorten it"),
        (lambda _: "/proc/x", r"'/proc/x' cannot be used: nothing can be created there .* choose another"),
        (lambda _: "/proc", r"'/proc' cannot be used: "),
        (lambda folder: f"{folder}/a\0b", r"nothing can be created there \(embedded null byte\)"),
        (lambda _: "", r"The checkpoint folder '' has no name\. Give CheckpointPolicy\(path=\.\.\.\)"),
        (lambda _: " ", r"The checkpoint folder ' ' has no name"),
        (lambda _: "file://", r"The checkpoint folder 'file://' has no name"),
        (lambda _: "nothing://there/c", r"The checkpoint URL 'nothing://there/c' cannot be used: Protocol not known"),
    ],
    ids=[
        "file",
        "below-a-file",
        "link",
        "name",
        "path",
        "proc",
        "in-proc",
        "null",
        "empty",
        "space",
        "url",
        "protocol",
    ],
)
def test_an_impossible_checkpoint_folder_is_refused_at_the_start(tmp_path, place, text):
    with pytest.raises(UsageError, match=text):
        train.start(workers.policy(place(tmp_path)))


UNPRIVILEGED = """
import os, sys
from azureml_elastic import train
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.errors import UsageError

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path in sys.argv[1:]:
    try:
        train.start(CheckpointPolicy(path=path))
    except UsageError as error:
        print(error)
"""


def test_a_folder_without_write_permission_is_refused_at_the_start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNPRIVILEGED)
    (tmp_path / "here").mkdir()
    for folder in (tmp_path / "here", tmp_path):
        folder.chmod(0o555)
    done = run_script([sys.executable, script, "here", "here/new", "new"], cwd=tmp_path, timeout=600)
    tmp_path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    user = os.geteuid() or 65534
    expected = [("here", "here"), ("here/new", "here"), ("new", ".")]
    assert done.stdout.splitlines() == [
        f"The checkpoint folder {folder!r} cannot be used: the user with id {user} may not create files in {where!r}. "
        "Give this user write permission, or choose another checkpoint folder."
        for folder, where in expected
    ]


def mounted(folder, options, script):
    """Run a script in a mount namespace, in which a tmpfs is mounted at a folder."""
    command = f'mount -t tmpfs -o {options} none "{folder}" && exec "$0" "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable, script],
        cwd=Path.cwd(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    return done


READ_ONLY = """
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.errors import UsageError

for path in ({folder!r}, {folder!r} + "/new"):
    try:
        open_storage(path).prepare()
    except UsageError as error:
        print(error)
"""


def test_a_read_only_file_system_is_refused_at_the_start(tmp_path):
    folder, script = tmp_path / "mount", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(READ_ONLY.format(folder=str(folder)))
    done = mounted(folder, "ro", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"cannot be used: the file system of {str(folder)!r} is read-only. Mount it") == 2


@pytest.fixture
def disk(tmp_path):
    """Return the folder of a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(done.stderr)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk):
    """Fill the disk, and return how to empty it again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(512)):
            pass
    return filler.unlink


def protect(disk):
    """Make the disk read-only, and return how to make it writable again."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    return lambda: subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def replace(disk):
    """Put a file in place of the checkpoint folder, and return how to put it back."""
    folder, aside = disk / "c", disk / "aside"
    folder.rename(aside)
    folder.write_text("")

    def restore():
        folder.unlink()
        aside.rename(folder)

    return restore


def tracked(folder):
    run = train.start(workers.policy(folder))
    run.track(model=nn.Linear(8, 8))
    run.commit()
    return run


def steps_of(folder):
    return sorted(int(path.parent.name.split(".")[0].removeprefix("step-")) for path in folder.glob("*/committed"))


def fail(run, caplog):
    """Take a checkpoint that fails, and train until that is known."""
    run.save()
    caplog.clear()
    until(lambda: run.commit() or "was not committed" in caplog.text)
    return caplog.records[0].getMessage()


@pytest.mark.parametrize("trouble", [fill, protect, replace])
def test_training_goes_on_after_a_save_that_failed_and_the_next_one_is_taken(disk, caplog, trouble):
    folder = disk / "c"
    with tracked(folder) as run:
        run.save(wait=True)
        end = trouble(disk)
        warning = fail(run, caplog)
        assert re.match(rf"The checkpoint of step 1 in {folder} was not committed: writing failed .*\[Errno", warning)
        assert re.search(r"\. Training goes on; the last commit is step-0*1\.", warning), warning
        end()
        assert steps_of(folder) == [1], "an older checkpoint is kept until a newer one is committed"
        assert len(list(folder.glob("step-*"))) == 1, "nothing of the attempt is left"
        run.save(wait=True)
        saved = run.steps
        assert steps_of(folder) == [1, saved]
    with tracked(folder) as run:
        assert run.steps == saved + 1


def test_a_deleted_folder_is_made_again(tmp_path):
    folder = tmp_path / "a" / "c"
    with tracked(folder) as run:
        run.save(wait=True)
        shutil.rmtree(folder.parent)
        run.commit()
        run.save(wait=True)
        assert steps_of(folder) == [2]
        shutil.rmtree(folder)
        run.commit()
    assert steps_of(folder) == [3]
    with tracked(folder) as run:
        assert run.steps == 4


@pytest.mark.parametrize("trouble", [fill, protect, replace])
def test_a_run_whose_last_state_cannot_be_saved_fails_at_its_end(disk, trouble):
    folder = disk / "c"
    run = tracked(folder)
    run.save(wait=True)
    run.commit()
    end = trouble(disk)
    text = rf"Checkpoints could not be written to {folder}: step 2: .* Repair .* the last commit is step-0*1\."
    with pytest.raises(CheckpointError, match=text), run:
        pass
    end()
    with tracked(folder) as run:
        assert run.steps == 2


def test_the_last_save_is_tried_even_after_two_that_failed(disk, caplog):
    folder = disk / "c"
    with tracked(folder) as run:
        run.save(wait=True)
        end = fill(disk)
        fail(run, caplog)
        fail(run, caplog)
        end()
        steps = run.steps
    assert steps_of(folder) == [1, steps]


def test_a_pointer_that_could_not_be_written_is_written_by_the_next_save(tmp_path, caplog):
    with tracked(tmp_path) as run:
        run.save(wait=True)
        (tmp_path / "latest.json.tmp").mkdir()
        assert "latest.json.tmp" in fail(run, caplog)
        (tmp_path / "latest.json.tmp").rmdir()
        run.save(wait=True)
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == run.steps


class Late(LocalStorage):
    """Storage that reports an error after it has replaced a file."""

    def replace(self, name, content):
        super().replace(name, content)
        if b'"step": 1' in content:
            raise OSError(errno.EIO, "Input/output error")


def test_a_pointer_that_was_written_in_spite_of_an_error_is_not_that_of_another_run(tmp_path):
    agent = StandaloneAgent(Late(tmp_path), WorkerIdentity(1, 0, 2, 0))
    with pytest.raises(OSError, match="Input/output error"):
        agent.commit(Reference("a", 1, "d"), 0.0)
    agent.commit(Reference("b", 2, "d"), 0.0)
    assert agent.pointer() == Reference("b", 2, "d")
