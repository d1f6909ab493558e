"""A whole run of a script without a session that has ranks and an address of its own."""

from __future__ import annotations

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS


def test_a_script_that_starts_its_ranks_itself_is_named_and_does_not_wait(tmp_path, caplog):
    """Where torch would wait for half an hour in a process that the script has spawned."""
    cluster = LocalCluster(
        (1, 1), distribution=ElasticDistribution(max_restarts=0), run_dir=tmp_path / "run", start=FORKED
    )
    report = cluster.run([str(PROGRAMS / "launches_itself.py")])
    assert (report.outcome, report.exit_code, len(report.rounds)) == ("failed", 1, 1)
    assert "is to be opened at localhost:9, where nobody has listened" in report.message
    assert "Call init_process_group() without init_method, rank and world_size" in report.message
    assert "launches_itself.py:13 sets MASTER_ADDR to 'localhost'" in caplog.text
    assert "launches_itself.py:19 starts its ranks itself by mp.spawn()" in caplog.text
    assert "sets MASTER_ADDR" not in (report.paths.logs / "node-0.log").read_text()  # no agent reads scripts for that
    assert {total.activity for total in report.activities}.isdisjoint({"training", "lost work", "unknown"})
