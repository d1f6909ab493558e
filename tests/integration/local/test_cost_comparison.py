"""The sample that compares the cost of dedicated and of elastic low-priority nodes."""

import functools
import importlib.util
import re
import subprocess
import sys

from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED
from tests.support.paths import SAMPLES

SAMPLE = SAMPLES / "cost_comparison"


def test_the_article_s_table():
    command = [sys.executable, str(SAMPLE), "--article-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Standard configuration: 80.76 USD" in done.stdout
    assert "Low priority with elastic training: 19.13 USD" in done.stdout


def test_the_bill_of_a_run(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("cost_comparison", SAMPLE / "__main__.py")
    sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sample)
    monkeypatch.setattr(sample, "LocalCluster", functools.partial(LocalCluster, start=FORKED))
    monkeypatch.setattr(sys, "argv", ["cost_comparison"])
    code = sample.main()
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert re.search(r"recovering: preemption", shown)
    assert len(re.findall(r"Saved against dedicated nodes: \d+", shown)) == 3
