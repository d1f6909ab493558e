"""What Lightning's module and callbacks keep beside the weights survives the loss of a node, by an observer's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.observed import assert_same, assert_same_steps, observed, run_observed

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
pytest.importorskip("torchmetrics")

CORPUS = Path(__file__).with_name("corpus")
pytestmark = pytest.mark.xdist_group("lightning")
CLOSE = {"own": 1e-5, "weights": 1e-5, "val_loss": 1e-4}
OF_A_RANK = 0.3
"""What a rank has collected from its own batches of an epoch, as a list of losses, goes on from that of one rank: in an
epoch in which a rank is lost or comes it is a mean over other batches. That of all other epochs is the same."""


def run(folder, callback, *more, **options):
    script = CORPUS / "lightning_state.py"
    return run_observed(
        script, folder, "--callback", callback, *more, imports=CORPUS.with_name("lightning_script.py"), **options
    )


@pytest.mark.parametrize(
    ("callback", "steps", "chaos", "interrupted"),
    [
        ("average", 60, "kill=rank0@step:27,add@step:32", {1, 2}),
        ("accumulation", 40, "kill=rank0@step:24,add@step:28", {1, 2}),
        ("finetuning", 60, "kill=rank0@step:27", {1}),
        ("swa", 60, "kill=rank0@step:47", {2}),
    ],
)
def test_what_callbacks_keep_survives_the_loss_of_a_node(tmp_path, callback, steps, chaos, interrupted):
    expected = run(tmp_path / "undisturbed", callback, nodes=(2, 2))
    found = run(tmp_path / "run", callback, "--full", "2", nodes=(1, 2), chaos=chaos)
    assert not found.report.missed_faults
    assert found.report.audit.rolled_back_steps == 0
    assert found.report.last_step == expected.report.last_step == expected.record["completed_steps"] == steps
    means = zip(found.record.pop("means"), expected.record.pop("means"), strict=True)
    for epoch, (mean, wanted) in enumerate(means):
        assert mean == pytest.approx(wanted, rel=OF_A_RANK if epoch in interrupted else 1e-5), epoch
    # A metric of the last epoch counts the batches of the rank that goes on in place of those of the lost one: at most
    # the 40 samples of ten steps before the loss, of 160.
    in_last_epoch = callback == "swa"
    assert found.record.pop("accuracy") == pytest.approx(
        expected.record.pop("accuracy"), abs=40 / 160 if in_last_epoch else 1e-6
    )
    assert_same(found.record, expected.record, CLOSE)
    assert_same_steps(observed(found), observed(expected), 1e-5)
