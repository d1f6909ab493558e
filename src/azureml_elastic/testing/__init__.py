"""A workspace of Azure ML on one machine, to which the unmodified ``MLClient`` submits and which runs what it gets.

Names are imported on first access, because pytest loads this package at every start, for its fixture.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from azureml_elastic.testing.api.tracking import Logged
    from azureml_elastic.testing.jobs.machines import Evicted, Eviction, Pool, read_trace
    from azureml_elastic.testing.workspace import LocalWorkspace

__all__ = ["Evicted", "Eviction", "LocalWorkspace", "Logged", "Pool", "read_trace"]

_HOMES = {"LocalWorkspace": "workspace", "Logged": "api.tracking"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'jobs.machines')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
