"""Modules whose import reads the rank, and keeps it for nothing but the choice of the process that logs.

They are imported by the preload server all the same, and each worker sets its own rank after the fork. The attributes
are those of ``lightning_utilities/core/rank_zero.py`` and ``torchmetrics/utilities/prints.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

__all__ = ["reads_rank_only", "set_rank"]

_READERS = frozenset(
    {
        "lightning.fabric.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "torchmetrics.utilities.prints",
    }
)
_RANKS = {"lightning_utilities.core.rank_zero": "RANK", "torchmetrics.utilities.prints": "LOCAL_RANK"}
"""Variable of the rank that the function ``rank_zero_only`` of a module has as an attribute."""

_BETWEEN = frozenset({"os", "collections.abc"})


def reads_rank_only(reader: FrameType | None) -> bool:
    """Return whether a variable is read by a module that keeps only its rank.

    Args:
        reader: frame that reads ``os.environ``, perhaps through a function of the standard library
    """
    while reader is not None and reader.f_globals.get("__name__") in _BETWEEN:
        reader = reader.f_back
    return reader is not None and reader.f_globals.get("__name__") in _READERS


def set_rank(environ: Mapping[str, str]) -> None:
    """Set the rank that imported modules keep, from the variables of a worker."""
    for module, variable in _RANKS.items():
        function = getattr(sys.modules.get(module), "rank_zero_only", None)
        if function is not None and hasattr(function, "rank") and variable in environ:
            function.rank = int(environ[variable])
