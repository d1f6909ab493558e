"""Checkpoint folders that cannot be used: refused at the start, and tolerated for a while in the middle of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from azureml_elastic import train
from azureml_elastic.errors import UsageError
from tests.support.node_server import run_script
from tests.support.train import workers


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
    done = run_script([sys.executable, script, "here", "here/new", "new"], cwd=tmp_path, timeout=60)
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
        cwd=Path.cwd(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    return done


READ_ONLY = """
from azureml_elastic.checkpoint.storage.opening import open_storage
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
