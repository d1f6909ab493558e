"""Numbers, lists and small tensors that a module and callbacks keep in attributes, and the states of ``torchmetrics``.

No loop of the script repeats them, as Lightning has the loop. What has another value than before the first step is
state; an attribute that a script sets once, such as a path, is not. The next process has the values of one rank: lists
and metrics that each rank fills from its own batches go on from those of that rank.
"""

from __future__ import annotations

import logging
import numbers
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from azureml_elastic.train.found.numbers import fill
from azureml_elastic.train.integrations.lightning.checkpoint_hooks import callbacks_of

_MOST_ITEMS, _MOST_NUMBERS = 100_000, 1 << 20
"""Limits on the items of a container, and on the numbers of a tensor: what is captured in each step must be small."""

_MOST_DEPTH = 4
"""Limit on containers within each other."""

_BASES = ("LightningModule", "LightningDataModule")

_HYPERPARAMETERS = frozenset({"_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"})

_PLAIN = (bool, int, float, str, bytes, type(None))

Values = dict[str, Any]

_LOG = logging.getLogger(__name__)


class _Unfit(Exception):
    """A value that is not captured."""


class Attributes:
    """The attributes of a trainer's module and callbacks, compared with those before the first step.

    Attributes:
        left_out: names of containers that have changed and hold what cannot be captured
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first: dict[str, Values] | None = None
        self._lengths: dict[str, int] = {}
        self._metrics: dict[str, tuple[Any, Values]] = {}
        self.left_out: set[str] = set()

    def begin(self) -> None:
        """Take the values as those before the first step."""
        if self._first is None:
            self._first = {}
            self._first = self._changed()

    def capture(self) -> dict[str, Any]:
        """Return the values that have changed since, and the states of the metrics; nothing before :meth:`begin`."""
        if self._first is None:
            return {}
        metrics = {name: self._state_of(name, metric) for name, metric in _metrics_of(self._trainer)}
        return {
            "values": self._changed(),
            "metrics": {name: state for name, state in metrics.items() if state},
            "left_out": sorted(self.left_out),
        }

    def apply(self, captured: Mapping[str, Any]) -> None:
        """Set the values that :meth:`capture` has returned, in this process or a former one."""
        for key, holder in _holders(self._trainer):
            for name, value in captured.get("values", {}).get(key, {}).items():
                _set(holder, name, value)
        metrics = dict(_metrics_of(self._trainer))
        for name, state in captured.get("metrics", {}).items():
            if name in metrics:
                _load_metric(metrics[name], state)

    def names(self, captured: Mapping[str, Any]) -> list[str]:
        """Return the names of captured lists and metrics, which hold what one rank has collected."""
        values = captured.get("values", {})
        lists = [f"{key}.{name}" for key, each in values.items() for name, value in each.items()
                 if isinstance(value, list) and value]  # fmt: skip
        return sorted([*lists, *captured.get("metrics", {})])

    def _changed(self) -> dict[str, Values]:
        assert self._first is not None
        found: dict[str, Values] = {}
        for key, holder in _holders(self._trainer):
            first = self._first.get(key, {})
            # Floats of an object of Lightning's own are times of this process's clock.
            own = type(holder).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
            for name, value in vars(holder).items():
                if name in _left_to_lightning(holder):
                    continue
                try:
                    plain = _plain(value, with_floats=not own)
                except _Unfit:
                    self._note_unfit(f"{key}.{name}", value)
                    continue
                if name not in first or not _same(plain, first[name]):
                    found.setdefault(key, {})[name] = plain
        return found

    def _note_unfit(self, path: str, value: Any) -> None:
        if isinstance(value, (list, dict, set, deque)) and self._lengths.setdefault(path, len(value)) != len(value):
            self.left_out.add(path)

    def _state_of(self, name: str, metric: Any) -> Values:
        """Return a metric's state; copied, as an update changes it in place, but once for each update."""
        count = metric._update_count  # noqa: SLF001
        if not count:
            return {}
        before = self._metrics.get(name)
        if before is None or before[0] != count:
            state = {each: _copied(getattr(metric, each)) for each in metric._defaults}  # noqa: SLF001
            self._metrics[name] = (count, {"state": state, "count": count})
        return self._metrics[name][1]


def scaled(captured: Mapping[str, Any], trainer: Any, ranks: int) -> dict[str, Any]:
    """Return captured values with metrics as if all ranks of a former round had collected what the one has.

    Rank 0 takes the whole of what is added up, and the others begin with nothing.
    """
    metrics, found = dict(_metrics_of(trainer)), {}
    for name, each in captured.get("metrics", {}).items():
        if name not in metrics:
            continue
        metric, state = metrics[name], dict(each["state"])
        for part, value in each["state"].items():
            reduce = getattr(metric._reductions.get(part), "__name__", None)  # noqa: SLF001
            if reduce in ("dim_zero_mean", "dim_zero_max", "dim_zero_min"):
                continue
            if trainer.global_rank:
                default = metric._defaults[part]  # noqa: SLF001
                state[part] = default.clone() if isinstance(default, torch.Tensor) else []
            elif reduce == "dim_zero_sum":
                state[part] = value * ranks
        found[name] = {**each, "state": state}
    return {**captured, "metrics": found}


def _holders(trainer: Any) -> list[tuple[str, Any]]:
    callbacks = ((f"{index}.{type(each).__name__}", each) for index, each in enumerate(callbacks_of(trainer)))
    data = [] if trainer.datamodule is None else [("datamodule", trainer.datamodule)]
    module = trainer.lightning_module
    if module not in _layers:
        _layers[module] = [
            (f"{type(module).__name__}.{name}", each) for name, each in module.named_modules() if name and _is_own(each)
        ]
    return [(type(module).__name__, module), *_layers[module], *data, *callbacks]


_layers: WeakKeyDictionary[Any, list[tuple[str, Any]]] = WeakKeyDictionary()
"""The layers of modules whose classes are the script's: those of installed libraries keep their state in tensors."""


def _is_own(layer: Any) -> bool:
    source = getattr(sys.modules.get(type(layer).__module__), "__file__", None) or ""
    return type(layer).__module__ == "__main__" or not ("site-packages" in source or "dist-packages" in source)


_skipped: dict[type, frozenset[str]] = {}


def _left_to_lightning(holder: Any) -> frozenset[str]:
    """Return the names of attributes that Lightning and torch set on each object of a kind."""
    kind = type(holder)
    if kind not in _skipped:
        base = next((each for each in kind.__mro__ if each.__name__ in _BASES), None)
        base = nn.Module if base is None and issubclass(kind, nn.Module) else base
        _skipped[kind] = frozenset(() if base is None else vars(base())) | _HYPERPARAMETERS | {"training"}
    return _skipped[kind]


def _metrics_of(trainer: Any) -> list[tuple[str, Any]]:
    return [
        (name, each)
        for name, each in trainer.lightning_module.named_modules()
        if hasattr(each, "_update_count") and hasattr(each, "_reductions")
    ]


def _load_metric(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["state"].items():
        if name in metric._defaults:  # noqa: SLF001
            setattr(metric, name, _copied(value, metric.device))
    metric._update_count, metric._computed = saved["count"], None  # noqa: SLF001


def _copied(value: Any, device: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    return [each if device is None else each.to(device) for each in value]


def _plain(value: Any, *, with_floats: bool, depth: int = 0) -> Any:
    """Return a value as one of lists, sets, tuples and dictionaries that does not change with it.

    Raises:
        _Unfit: it is another kind of value, or too large.
    """
    if isinstance(value, float) and not with_floats:
        raise _Unfit
    if isinstance(value, _PLAIN) and not isinstance(value, type):
        return value
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.numel() > _MOST_NUMBERS:
            raise _Unfit
        return value
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # of numpy
        return value.item()
    if (
        not isinstance(value, (list, tuple, set, frozenset, deque, dict))
        or depth > _MOST_DEPTH
        or len(value) > _MOST_ITEMS
    ):
        raise _Unfit
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise _Unfit
        return {key: _plain(each, with_floats=with_floats, depth=depth + 1) for key, each in value.items()}
    items = [_plain(each, with_floats=with_floats, depth=depth + 1) for each in value]
    if isinstance(value, (set, frozenset)):
        return set(items)
    return tuple(items) if isinstance(value, tuple) else items


def _same(one: Any, other: Any) -> bool:
    """Return whether values are the same, tensors by identity."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
    return bool(one == other)


def _set(holder: Any, name: str, value: Any) -> None:
    if not fill(vars(holder).get(name), value):
        setattr(holder, name, value.copy() if isinstance(value, (list, dict, set)) else value)
