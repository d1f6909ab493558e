"""Workers of torchrun, and those that a node starts, forked or as new interpreters."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.node.agent.worker_processes import WorkerSet
from azureml_elastic.program.command import parse_program
from tests.support.forks.starting import ENVIRON
from tests.support.paths import SUPPORT
from tests.support.waiting import until

HERE = SUPPORT / "forks"

WORKER = """
import json, os, sys, time
from pathlib import Path
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
print(json.dumps([dict(os.environ), sys.argv, os.getcwd()]), file=sys.stderr, flush=True)
if os.environ["RANK"] == "0":
    time.sleep(300)
peer = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "0" / "stderr.log"
while not (peer.exists() and peer.read_text().endswith("]\\n")):
    time.sleep(0.02)
sys.exit(3)
"""
"""Rank 1 fails once rank 0 has written its report; then rank 0 is stopped."""

OURS = {"AZUREML_ELASTIC_HISTORY", "AZUREML_ELASTIC_ROUND", "AZUREML_ELASTIC_WORKER"}
OF_THE_RUN = OURS | {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}
OF_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""Variables that torchrun sets for an option of its own, and in place of torch's default, which a session replaces."""

PREFIX = "[worker"


def worker_reports(logs: Path):
    """Return the reports on the workers' standard error, by local rank."""
    found = {}
    for path in logs.rglob("stderr.log"):
        for line in path.read_text().splitlines():
            if line.startswith("["):
                environ, argv, folder = json.loads(line)
                kept = {name: value for name, value in environ.items() if name not in OF_THE_RUN | OF_TORCHRUN}
                found[path.parent.name] = (kept, environ.keys() - OF_TORCHRUN - OURS, argv, folder)
    return found


def test_forked_workers_equal_those_of_torchrun(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environ = {**ENVIRON, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--role=worker"]
    torchrun += [f"--log-dir={tmp_path / 'torchrun'}", "--redirects=3", "--tee=1", str(script), "--x", "1"]
    plain = subprocess.run(torchrun, env=environ, capture_output=True, text=True, check=False)
    ours = subprocess.run(
        [sys.executable, str(HERE / "node.py"), str(script), str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ours.returncode == 0, ours.stderr
    results = [line for line in ours.stdout.splitlines() if not line.startswith("[")]
    assert results == ["forked True {0: -15, 1: 3}", "plain False {0: -15, 1: 3}"], ours.stderr
    expected = worker_reports(tmp_path / "torchrun")
    assert sorted(expected) == ["0", "1"], plain.stderr
    for name in ("forked", "plain"):
        assert worker_reports(tmp_path / name) == expected
    prefixed = sorted(line for line in plain.stdout.splitlines() if line.startswith(PREFIX))
    assert prefixed == ["[worker0]:rank 0 of 2", "[worker1]:rank 1 of 2"]
    assert sorted(line for line in ours.stdout.splitlines() if line.startswith(PREFIX)) == sorted(prefixed * 2)


SAVING = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    Path("saving").touch()
    while not Path("saved").exists():
        time.sleep(0.01)
    os._exit(7)

signal.signal(signal.SIGTERM, save if os.environ["RANK"] == "0" else signal.SIG_DFL)
Path("ready" + os.environ["RANK"]).touch()
while True:
    time.sleep(300)
"""


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """Two workers, of which the first one saves on SIGTERM until there is a file ``saved``."""
    monkeypatch.chdir(tmp_path)
    Path("worker.py").write_text(SAVING)
    environments = {rank: {**os.environ, "RANK": str(rank)} for rank in range(2)}
    workers = WorkerSet(parse_program([sys.executable, "worker.py"]), tmp_path / "output", environments, {})
    workers.start(None)
    yield workers
    workers.terminate()
    workers.close(0)


def test_the_wait_for_a_worker_that_saves_ends_when_it_does(saving):
    until(lambda: Path("ready0").exists() and Path("ready1").exists())
    saving.terminate()
    closing = threading.Thread(target=saving.close, args=(3600,))
    closing.start()
    until(lambda: Path("saving").exists() and saving.exit_codes == {1: -15})
    assert closing.is_alive()
    Path("saved").touch()
    closing.join(60)
    assert not closing.is_alive()
    assert saving.exit_codes == {0: 7, 1: -15}


def test_a_worker_that_saves_for_longer_than_it_may_is_killed(saving):
    until(lambda: Path("ready0").exists() and Path("ready1").exists())
    saving.terminate()
    saving.close(0.1)
    assert saving.exit_codes == {0: -9, 1: -15}


def test_workers_have_the_time_that_torchrun_gives_them():
    default = inspect.signature(PContext.close).parameters["timeout"].default
    assert ElasticDistribution().stop_timeout.total_seconds() == default == 30
