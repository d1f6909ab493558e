"""The hooks of a step that a former process has completed without them, run again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from azureml_elastic.distributed.device import Fetched, device_of

__all__ = ["numbers", "recorded", "run_hooks", "same_names"]


def recorded(trainer: Any, outputs: Any) -> dict[str, dict[str, float | Fetched]]:
    """Return the metrics of the current step as they are before its hooks, and the numbers among its outputs.

    Those of a GPU are on their way, so that no step waits for them; see :func:`numbers`.
    """
    metrics = trainer._logger_connector.metrics["log"]  # noqa: SLF001
    found = outputs.items() if isinstance(outputs, Mapping) else ()
    outputs = {name: _fetched(value) for name, value in found if isinstance(value, torch.Tensor) and value.numel() == 1}
    return {"metrics": {name: _fetched(value) for name, value in metrics.items()}, "outputs": outputs}


def numbers(record: Mapping[str, Mapping[str, float | Fetched]]) -> dict[str, dict[str, float]]:
    """Return what :func:`recorded` has returned, and wait for what has not arrived."""
    return {
        part: {name: float(value.read()) if isinstance(value, Fetched) else value for name, value in values.items()}
        for part, values in record.items()
    }


def _fetched(value: Any) -> float | Fetched:
    return device_of(value.device).fetch(value) if isinstance(value, torch.Tensor) else float(value)


def run_hooks(trainer: Any, batch: Any, record: Mapping[str, Mapping[str, float]]) -> None:
    """Run the hooks after a batch, and log the metrics of its step.

    Args:
        trainer: trainer whose loops are as after these hooks
        batch: collated batch, on the CPU
        record: what :func:`recorded` returned in the former process, as numbers
    """
    loop, module, connector = trainer.fit_loop.epoch_loop, trainer.lightning_module, trainer._logger_connector  # noqa: SLF001
    call = importlib.import_module(type(trainer.fit_loop).__module__.replace("loops.fit_loop", "trainer.call"))
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
    batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)  # noqa: SLF001
    outputs = {name: torch.tensor(value) for name, value in record["outputs"].items()} or None
    connector.on_batch_start(batch)
    with same_names(trainer, repeated=True):
        call._call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, loop.batch_idx)  # noqa: SLF001
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, loop.batch_idx)  # noqa: SLF001
    connector.on_batch_end()
    if connector.should_update_logs:
        values = {name: torch.tensor(value) for name, value in record["metrics"].items()}
        connector.log_metrics({**values, **connector.metrics["log"]})


@contextmanager
def same_names(trainer: Any, *, repeated: bool) -> Iterator[None]:
    """Have files of ``ModelCheckpoint`` replaced that a former process may have written for the same step.

    Args:
        trainer: trainer with the callbacks
        repeated: whether code is repeated; else nothing is changed
    """
    name = "_enable_version_counter"
    callbacks = [each for each in trainer.checkpoint_callbacks if repeated and hasattr(each, name)]
    before = [getattr(each, name) for each in callbacks]
    for each in callbacks:
        setattr(each, name, False)
    try:
        yield
    finally:
        for each, value in zip(callbacks, before, strict=True):
            setattr(each, name, value)
