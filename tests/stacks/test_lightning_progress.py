"""The counters of Lightning's loops, as the next process has them at another world size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from azureml_elastic.train.integrations.lightning.progress import Progress, Stage

pl = pytest.importorskip("lightning.pytorch")


def captured(stage, *, completed):
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.ready, counts.started, counts.processed, counts.completed = 3, 3, 3, completed
    former = Progress(trainer)
    former.loader = SimpleNamespace(epoch=0, micro_batches=1)
    former.capture(stage)
    return former.state_dict()


@pytest.mark.parametrize(("stage", "completed"), [(Stage.STEP, 2), (Stage.HOOKS, 3), (Stage.DONE, 3)])
def test_batches_are_counted_in_those_of_the_present_world_size(stage, completed):
    """Three steps of one batch are three of two batches, and complete: the integration repeats the hooks by itself."""
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    progress = Progress(trainer)
    progress.loader = SimpleNamespace(micro_batches_in=lambda _: 2)
    progress.load_state_dict(captured(stage, completed=completed))
    found = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (found.total, found.current):
        assert (counts.ready, counts.started, counts.processed, counts.completed) == (6, 6, 6, 6)


def test_what_is_captured_of_the_loops_is_their_state_and_does_not_change_with_them():
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    progress = Progress(trainer)
    trainer.fit_loop.epoch_loop.batch_progress.increment_ready()
    before = trainer.fit_loop.state_dict()
    progress.capture(Stage.DONE)
    trainer.fit_loop.epoch_loop.batch_progress.increment_ready()
    trainer.fit_loop.epoch_progress.increment_by(4)
    assert progress.state_dict()["loops"] == before != trainer.fit_loop.state_dict()
