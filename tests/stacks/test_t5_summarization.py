"""The comparison of a base and an elastic job of the T5 sample, in its small form."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.paths import SAMPLES

pytest.importorskip("transformers")
pytest.importorskip("plotly")


def test_the_elastic_job_learns_as_the_base_job_does(tmp_path):
    command = [sys.executable, str(SAMPLES / "t5_summarization"), "--small", "--folder", str(tmp_path / "jobs")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    elastic = re.search(r"elastic: 60 steps .* world sizes \(3, 2,.*mean loss", ended.stdout)
    assert elastic, ended.stdout
    assert "World size over time" in (tmp_path / "jobs" / "comparison.html").read_text()
