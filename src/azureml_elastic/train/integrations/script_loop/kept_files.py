"""Files of weights that a script writes in steps which are trained already: those of the first time stay.

The weights are those of a later step by then.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wrapt import wrap_function_wrapper

_LOG = logging.getLogger(__name__)

_WRITERS = {"torch": ("save", "f"), "safetensors.torch": ("serialize_file", "filename")}
"""Functions by which scripts and libraries write weights, with the name of the argument for the file."""


@functools.cache
def keep_files(is_past: Callable[[], bool]) -> None:
    """Keep files that are there from now on while a function returns true; say once where one is not there."""
    warned: list[Path] = []

    def write(argument: str, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        file = args[1] if len(args) > 1 else kwargs.get(argument)
        past = isinstance(file, (str, os.PathLike)) and is_past()
        if past and Path(file).exists():
            return None
        if past and not warned:
            warned.append(Path(file))
            _LOG.warning(
                "%s is written in a step that is trained already, with the weights of a later one: the file of that "
                "time is not there.",
                file,
            )
        return wrapped(*args, **kwargs)

    for module, (name, argument) in _WRITERS.items():
        if module in sys.modules:
            wrap_function_wrapper(importlib.import_module(module), name, functools.partial(write, argument))
