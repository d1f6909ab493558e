"""Collectives of torch that a script, or a library that it uses, calls by itself: a metric's, for instance.

Such a call fails where a peer is lost, in the middle of the code that follows an update. As for the stack's own calls,
the step is then repeated up to it, so that what the script does behind it, such as the update of an average, is done.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_NAMES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)

_NOT_THE_SCRIPTS = ("torch", "accelerate", "deepspeed", "azureml_elastic")
"""Packages whose calls are parts of the script's calls of their own functions, which may differ in repeated steps."""

_ORIGINAL = "_azureml_elastic_original"
"""Attribute of a function in place of torch's."""


def watch(call: Callable[[Callable[[], Any]], Any]) -> None:
    """Have a function make each of these calls from now on, in place of the function of an earlier loop."""
    for name in _NAMES:
        function = getattr(dist, name)
        setattr(dist, name, _watched(getattr(function, _ORIGINAL, function), call))


def _watched(function: Callable[..., Any], call: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001
        if caller.partition(".")[0] in _NOT_THE_SCRIPTS:
            return function(*args, **kwargs)
        return call(functools.partial(function, *args, **kwargs))

    setattr(collective, _ORIGINAL, function)
    return collective
