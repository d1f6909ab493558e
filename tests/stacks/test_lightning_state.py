"""What Lightning's module and callbacks keep beside the weights survives the loss of a node, by an observer's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.observed import assert_same, assert_same_steps, observed, run_observed

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
pytest.importorskip("torchmetrics")

CORPUS = Path(__file__).with_name("corpus")
CLOSE = {"accuracy": 0.1, "means": 0.3, "own": 1e-5, "weights": 1e-5, "val_loss": 1e-4}
"""Of what each rank has collected from its own batches, that of one rank is left."""


def run(folder, callback, *more, **options):
    script = CORPUS / "lightning_state.py"
    return run_observed(script, folder, "--callback", callback, *more, imports=CORPUS / "toy.py", **options)


@pytest.mark.parametrize(
    ("callback", "chaos"),
    [
        ("average", "kill=rank0@step:27,add@step:34"),
        ("accumulation", "kill=rank0@step:24,add@step:28"),
        ("finetuning", "kill=rank0@step:27"),
        ("swa", "kill=rank0@step:47"),
    ],
)
def test_what_callbacks_keep_survives_the_loss_of_a_node(tmp_path, callback, chaos):
    expected = run(tmp_path / "undisturbed", callback, nodes=(2, 2))
    found = run(tmp_path / "run", callback, "--full", "2", nodes=(1, 2), chaos=chaos)
    assert not found.report.missed_faults
    assert found.report.audit.rolled_back_steps == 0
    assert found.report.last_step == expected.report.last_step == expected.record["completed_steps"]
    assert_same(found.record, expected.record, CLOSE)
    assert_same_steps(observed(found), observed(expected), 1e-5)
