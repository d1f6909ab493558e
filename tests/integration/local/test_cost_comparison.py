"""The sample that compares the cost of dedicated and of elastic low-priority nodes."""

import re
import sys

from tests.support.node_server import run_script
from tests.support.paths import SAMPLES


def test_the_article_s_table_and_the_bill_of_a_run(tmp_path):
    done = run_script([sys.executable, str(SAMPLES / "cost_comparison")], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Standard configuration: 80.76 USD" in done.stdout
    assert "Low priority with elastic training: 19.13 USD" in done.stdout
    assert re.search(r"recovering: preemption", done.stdout)
    assert len(re.findall(r"saved against dedicated nodes: \d+", done.stdout)) == 3
