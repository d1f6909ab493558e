"""The fields of a changed copy of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from azureml_elastic.config.base import ConfigModel
from azureml_elastic.submit.fields import JobFields, resources_of_pools

__all__ = ["given_fields", "merged_fields"]

_KIND = "kind"
"""The field by which the models of a union differ."""


def given_fields(model: ConfigModel) -> dict[str, Any]:
    """Return the fields that a model was given, without those that have their defaults."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def merged_fields(job: JobFields, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job with changes, which are not validated.

    Mappings are merged with those of the job, and a mapping changes the fields of a model that the job has.
    """
    fields = given_fields(job)
    if job.pools and "compute" in changes and job.resources == resources_of_pools(job.pools):
        del fields["resources"]  # derived again from the new pools
        if isinstance(changes["compute"], str | None):
            fields["resources"] = job.resources
    for name, value in changes.items():
        fields[name] = _merged(getattr(job, name, None), value)
    return fields


def _merged(held: Any, change: Any) -> Any:
    if not isinstance(change, Mapping):
        return change
    if not isinstance(held, ConfigModel):
        return {**held, **change} if isinstance(held, Mapping) else change
    fields = given_fields(held)
    kind = getattr(held, _KIND, None)
    if kind is not None:
        if change.get(_KIND, kind) != kind:
            return change
        fields[_KIND] = kind
    nested = {name: getattr(held, name, None) for name in change}
    return fields | {
        name: _merged(nested[name], value) if isinstance(nested[name], ConfigModel) else value
        for name, value in change.items()
    }
