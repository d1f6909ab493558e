"""What Azure ML refuses in the document of a submitted job, whatever runs it.

The sizes are those of the page "Service limits in Azure Machine Learning", the forms those that the models of the API
in azure-ai-ml describe (``JobBaseProperties``, ``JobResourceConfiguration``, ``QueueSettings``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from azureml_elastic.errors import UsageError

__all__ = ["check_limits"]

_LONGEST_TEXTS = {"displayName": 256, "experimentName": 256, "description": 5000}
_MOST_ENTRIES = 50
_LONGEST_KEY = 100
_LONGEST_VALUE = 1000
_SHM_SIZE = re.compile(r"0*[1-9]\d*[bkmg]", re.ASCII | re.IGNORECASE)
_TIERS = ("Null", "Spot", "Basic", "Standard", "Premium")
_COMPUTE = re.compile(r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/[^/]+/workspaces/[^/]+/computes/[^/]+")


def check_limits(properties: Mapping[str, Any]) -> None:
    """Check the properties of a job's document.

    Raises:
        UsageError: a text, a number of entries, a size, a tier or the id of a compute is none that Azure ML takes.
    """
    for field, longest in _LONGEST_TEXTS.items():
        if len(str(properties.get(field) or "")) > longest:
            raise UsageError(f"{field} has {len(str(properties[field]))} characters, above the limit of {longest}.")
    for field in ("tags", "properties"):
        _check_entries(field, properties.get(field))
    for job in _jobs(properties):
        _check_job(job)


def _check_entries(field: str, entries: object) -> None:
    if not isinstance(entries, Mapping):
        return
    if len(entries) > _MOST_ENTRIES:
        raise UsageError(f"The job has {len(entries)} {field}, above the limit of {_MOST_ENTRIES}.")
    for name, value in entries.items():
        if len(name) > _LONGEST_KEY or len(str(value)) > _LONGEST_VALUE:
            raise UsageError(
                f"{name!r:.120} of the job's {field} has {len(name)} characters and its value {len(str(value))}; the "
                f"limits are {_LONGEST_KEY} and {_LONGEST_VALUE}."
            )


def _jobs(properties: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the job, and the steps of a pipeline."""
    yield properties
    steps = properties.get("jobs")
    yield from (step for step in (steps.values() if isinstance(steps, Mapping) else ()) if isinstance(step, Mapping))


def _check_job(job: Mapping[str, Any]) -> None:
    compute = job.get("computeId")
    if compute and not _COMPUTE.fullmatch(str(compute)):
        raise UsageError(f"computeId={compute!r:.200} is not the id of a compute, /subscriptions/.../computes/<name>.")
    size = _value(job.get("resources"), "shmSize", "shm_size")
    if size is not None and not _SHM_SIZE.fullmatch(str(size)):
        raise UsageError(f"shmSize={size!r:.100} is not a number above 0 and one of the units b, k, m and g.")
    tier = _value(job.get("queueSettings") or job.get("queue_settings"), "jobTier", "job_tier")
    if tier is not None and tier not in _TIERS:
        raise UsageError(f"jobTier={tier!r:.100} is none of {', '.join(_TIERS)}.")


def _value(held: object, *names: str) -> Any:
    """Return a field that has one name in jobs and another in the steps of pipelines."""
    found = held if isinstance(held, Mapping) else {}
    return next((found[name] for name in names if found.get(name) is not None), None)
