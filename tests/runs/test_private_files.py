"""Whole runs of real nodes whose files no other user of the machine can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS

OTHERS = 0o077


def open_to_others(folder: Path) -> dict[str, str]:
    """Return the modes of what others can reach in a folder that they can list."""
    found: dict[str, str] = {}
    for path in folder.iterdir():
        mode = path.stat().st_mode
        if mode & OTHERS:
            found |= {str(path): oct(mode)}
    return found


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "in a folder that others can list"])
def test_all_that_a_run_writes_is_for_its_user_alone(tmp_path, is_there):
    run_dir = tmp_path / "runs" / "run"
    if is_there:
        run_dir.mkdir(parents=True)
        run_dir.chmod(0o755)
    cluster = LocalCluster((1, 1), start=FORKED, run_dir=run_dir, audit=True)
    assert cluster.run([str(PROGRAMS / "chaos_train.py"), "--epochs", "1"]).outcome == "succeeded"
    assert {"table.sqlite", "report.json", "workers", "samples"} <= {path.name for path in run_dir.iterdir()}
    assert open_to_others(run_dir) == {}
    assert is_there or not run_dir.stat().st_mode & OTHERS
