"""What Lightning does by itself, so that it depends on the nodes or begins anew: said once in a process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DistributedSampler

_LOG = logging.getLogger(__name__)

_IDS = ("_id", "_run_id", "_experiment_id", "_experiment_key")
"""Attributes in which loggers keep an id that the script has given."""


def warn_of_new_versions(trainer: Any, loggers: Iterable[Any]) -> None:
    """Warn of loggers of a new process that no id has go on where those of the former one have ended."""
    for logger in loggers if trainer.is_global_zero else ():
        if all(getattr(logger, name, None) is None for name in _IDS):
            _warn(
                f"{type(logger).__name__} begins anew in this process, with the steps from here on. To have all steps "
                "in one place, give it an id that stays the same, such as that of TORCHELASTIC_RUN_ID."
            )


def warn_of_repeated_samples(loader: Any, ranks: int) -> None:
    """Warn where Lightning's sampler has some samples evaluated twice, so that all ranks have as many."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        samples = len(loader.dataset)
        if repeated := -samples % ranks:
            _warn(
                f"Lightning evaluates {repeated} of {samples} samples twice, so that each of the {ranks} ranks has as "
                "many: results depend on the number of nodes. Give the evaluation data a length that all numbers of "
                "ranks divide."
            )


@functools.cache
def _warn(text: str) -> None:
    _LOG.warning("%s", text)
