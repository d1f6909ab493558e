"""What several tests of the session start from."""

import pytest
import torch.distributed as dist

from tests.support.train import training


@pytest.fixture
def alone(monkeypatch):
    """Start and end sessions in this process; those of ``training.MADE`` are given up."""
    training.forget_environment(monkeypatch)
    yield
    while training.MADE:
        training.MADE.pop().__exit__(KeyboardInterrupt, None, None)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
