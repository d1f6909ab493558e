"""Translation of azure-ai-ml's distributions, given as objects or as dictionaries of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.errors import SubmitError

__all__ = ["translated"]

_OF_RAY = (
    "address",
    "include_dashboard",
    "dashboard_port",
    "head_node_additional_args",
    "worker_node_additional_args",
)
"""Options of Ray that the elastic agents choose themselves."""


def _kind_of(given: Any) -> str | None:
    """Return the type of a distribution of azure-ai-ml in lower case, such as ``pytorch``; ``None`` for another value.

    Dictionaries without a type, and those of the type ``elastic``, have the fields of an ``ElasticDistribution``.
    """
    if given is None or isinstance(given, ElasticDistribution):
        return None
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    text = str(getattr(kind, "value", kind)).lower() if isinstance(kind, str) else None
    return None if text == "elastic" else text


def translated(given: Any) -> Any:
    """Return the fields that a distribution of azure-ai-ml has in an ``ElasticDistribution``; other values as given.

    Fields of an elastic distribution may stand beside the type ``pytorch``.

    Raises:
        SubmitError: the distribution has no elastic equivalent.
    """
    kind = _kind_of(given)
    if kind is None:
        return given
    fields = dict(given) if isinstance(given, Mapping) else {}
    fields.pop("type", None)
    if kind == "ray":
        options = {name: value for name in _OF_RAY if (value := fields.pop(name, getattr(given, name, None)))}
        for name, value in options.items():
            raise SubmitError(
                f"RayDistribution({name}={value!r}) cannot be carried: the elastic agents start Ray themselves. Leave "
                'it out, or give distribution=ElasticDistribution(framework="ray").'
            )
        fields.pop("port", None)
        return {"framework": "ray", **fields}
    if kind == "pytorch":
        count = fields.pop("process_count_per_instance", getattr(given, "process_count_per_instance", None))
        return {**fields, "process_count_per_instance": count or 1}
    framework = 'framework="horovod"' if kind == "mpi" else "..."
    name = f"{{'type': {kind!r}}}" if isinstance(given, Mapping) else type(given).__name__
    raise SubmitError(
        f"distribution={name} cannot be carried: an elastic job runs PyTorch, Horovod, Dask or Ray. Give "
        f"distribution=ElasticDistribution({framework}) if the script runs so."
    )
