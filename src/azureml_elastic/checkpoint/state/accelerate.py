"""The torch objects inside Accelerate's wrappers, which have neither the hooks nor the step counts of torch's own."""

from __future__ import annotations

from typing import Any

__all__ = ["unwrap_optimizer", "unwrap_scheduler"]


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper; any other object is returned unchanged."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def unwrap_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside Accelerate's wrapper; any other object is returned unchanged."""
    return scheduler.scheduler if type(scheduler).__name__ == "AcceleratedScheduler" else scheduler
