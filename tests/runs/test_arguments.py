"""The arguments of workers, with variables of each one, however workers and their program are started."""

from __future__ import annotations

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED

SCRIPT = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
expected = [os.environ[name] for name in names]
assert sys.argv[1:] == [*expected, "$RANK", "%{worker:RANK}"], sys.argv
assert sys.orig_argv[-9:] == sys.argv[1:], sys.orig_argv
sys.stdout.write(f"arguments of rank {' '.join(sys.argv[1:5])}\\n")
"""
ARGUMENTS = (
    '$RANK "${LOCAL_RANK}" ${WORLD_SIZE:-1} $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR "$MASTER_PORT" '
    "'$RANK' %{worker:RANK}"
)


@pytest.mark.parametrize(("program", "preload"), [("-m train", True), ("train.py", False)], ids=["forked", "started"])
def test_each_worker_receives_its_own_arguments(tmp_path, monkeypatch, preload, program):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGLEVEL", "DEBUG")  # says how workers are started
    (tmp_path / "train.py").write_text(SCRIPT)
    cluster = LocalCluster(
        (1, 1),
        start=FORKED,
        run_dir=tmp_path / "run",
        timeout=120,
        distribution=ElasticDistribution(process_count_per_instance=2, preload_workers=preload),
    )
    report = cluster.run([f"python {program} {ARGUMENTS}"])
    (path,) = report.paths.logs.iterdir()
    text = path.read_text()
    assert (report.outcome, report.exit_code) == ("succeeded", 0), text
    lines = sorted(line.partition("arguments of ")[2] for line in text.splitlines() if "arguments of" in line)
    assert lines == ["rank 0 0 2 2", "rank 1 1 2 2"]
    assert ("from the preload server" in text) == preload
