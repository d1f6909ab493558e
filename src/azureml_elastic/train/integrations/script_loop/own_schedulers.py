"""Schedulers that a script steps by itself, unknown to its stack: found by the optimizers whose rates they set.

The state of each is one of the run's, and it takes no step while the script repeats steps and epochs: one that follows
a metric, as ``ReduceLROnPlateau`` does, would be given other values than at that time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch.optim import lr_scheduler
from wrapt import wrap_function_wrapper

_made: list[weakref.ref[Any]] = []

_paused: list[Callable[[Any], bool]] = []


@functools.cache
def note_schedulers() -> None:
    """Note the schedulers that are made from now on."""
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
            wrap_function_wrapper(kind, "__init__", _note)  # some of them do not call that of their base


def schedulers_of(optimizers: Collection[Any], known: Collection[Any]) -> list[Any]:
    """Return the schedulers that set rates of some optimizers, in the order in which they were made.

    Args:
        known: schedulers that are known, and left out with those that they consist of
    """
    made = [each for reference in _made if (each := reference()) is not None]
    inner = {id(part) for each in (*made, *known) for part in getattr(each, "_schedulers", ())}
    inner |= {id(each) for each in known}
    ids = {id(each) for each in optimizers}
    return [each for each in made if id(each) not in inner and id(getattr(each, "optimizer", None)) in ids]


def pause_schedulers(schedulers: Collection[Any], is_past: Callable[[], bool]) -> None:
    """Have schedulers take no step while a function returns true."""
    wanted = weakref.WeakSet(schedulers)
    _paused.append(lambda scheduler: scheduler in wanted and is_past())
    for kind in {type(each) for each in schedulers}:
        _replace_step(next(base for base in kind.__mro__ if "step" in vars(base)))


@functools.cache
def _replace_step(kind: type) -> None:
    wrap_function_wrapper(kind, "step", _step)


def _note(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    if not any(each() is scheduler for each in _made):
        # Weakly: one that the script drops must not keep its optimizer, and that its weights.
        _made.append(weakref.ref(scheduler))
    return wrapped(*args, **kwargs)


def _step(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    return None if any(is_paused(scheduler) for is_paused in _paused) else wrapped(*args, **kwargs)
