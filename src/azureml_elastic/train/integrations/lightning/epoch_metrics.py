"""What ``self.log(..., on_epoch=True)`` has added up since an epoch began, over the processes that train it.

A rank adds up its own batches. The next process goes on from the sums of the rank whose state it continues, as those of
a lost rank are gone: a mean is then one over the batches of that rank, and a sum is what they make of all batches.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Sums", "added_up", "continue_with", "divided", "forget"]

_SUM, _COUNT = "value", "cumulated_batch_size"
_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")

Sums = dict[str, dict[str, Any]]


def added_up(trainer: Any, earlier: Sums) -> Sums:
    """Return the sums of the epoch by metric; ``torchmetrics`` objects have states of their own and are left out.

    Args:
        trainer: trainer in an epoch
        earlier: sums of former processes
    """
    found = dict(earlier)
    for key, metric in trainer.fit_loop.epoch_loop._results.items():  # noqa: SLF001
        meta = metric.meta
        if metric.is_tensor and meta.on_epoch and not metric.has_reset and meta.dataloader_idx is None:
            found[key] = {
                **{name: getattr(meta, name) for name in _FIELDS},
                "reduce_fx": meta.reduce_fx.__name__,
                "sync_dist": meta.sync.should,
                "rank_zero_only": meta.sync.rank_zero_only,
                _SUM: _joined(metric, key, _SUM, earlier),
                _COUNT: _joined(metric, key, _COUNT, earlier) if meta.is_mean_reduction else 0,
            }
    return found


def divided(sums: Sums, ranks: int, ranks_now: int) -> Sums:
    """Return what a rank would have added up if there had been the present number of ranks."""
    share = ranks / ranks_now
    return {
        key: {
            **state,
            _SUM: state[_SUM] * (share if state["reduce_fx"] in ("mean", "sum") else 1),
            _COUNT: state[_COUNT] * share,
        }
        for key, state in sums.items()
    }


def continue_with(trainer: Any, earlier: Sums) -> list[str]:
    """Add the sums of former processes to those of this one, once; return the metrics that only those know."""
    results, unknown = trainer.fit_loop.epoch_loop._results, []  # noqa: SLF001
    for key, state in earlier.items():
        if key not in results or results[key].has_reset:
            unknown.append(key)
            names = (*_FIELDS, "reduce_fx", "sync_dist", "rank_zero_only")
            reduce = trainer.strategy.reduce
            first = torch.as_tensor(state[_SUM], device=trainer.strategy.root_device)
            results.pop(key, None)
            results.log(value=first, batch_size=1, sync_dist_fn=reduce, **{name: state[name] for name in names})
            results[key].reset()
            results[key].has_reset = False
        metric = results[key]
        joined = {name: _joined(metric, key, name, earlier) for name in (_SUM, _COUNT) if hasattr(metric, name)}
        for name, value in joined.items():
            setattr(metric, name, value)
        metric._computed, metric._update_count = None, 1  # noqa: SLF001 - as after an update
    return unknown


def forget(trainer: Any, keys: list[str]) -> None:
    """Remove metrics that :func:`continue_with` has made: the script will make them as it wants them."""
    for key in keys:
        trainer.fit_loop.epoch_loop._results.pop(key, None)  # noqa: SLF001


def _joined(metric: Any, key: str, name: str, earlier: Sums) -> Any:
    own = getattr(metric, name)
    if key not in earlier:
        return own
    other = torch.as_tensor(earlier[key][name], device=own.device)
    if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
        return metric.meta.reduce_fx(own, other)
    return own + other
