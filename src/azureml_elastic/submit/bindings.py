"""Inputs without a value of their own: outputs of other steps, inputs of the pipeline, and search expressions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from azureml_elastic.submit.sdk_hooks import binding_type, is_binding

LITERALS = {bool: "boolean", int: "integer", float: "number", str: "string"}
"""Azure ML's names of the types of literals."""


@dataclass(frozen=True)
class Bound:
    """An input whose value is known only when the pipeline or the trial of a sweep runs.

    Args:
        value: object of azure-ai-ml, such as ``prepare.outputs.data`` or ``Choice([1, 2])``, or an expression of YAML.
        mode: mode in which the nodes access it; ``None`` for the default.
        searched: whether the value is a search expression.
    """

    value: Any
    type: str | None = None
    mode: str | None = None
    searched: bool = False

    def __repr__(self) -> str:
        return f"{type(self.value).__name__}(...)" if self.searched else f"<{self.type or 'value'} of the pipeline>"

    def __deepcopy__(self, _: object) -> Bound:
        return self  # a copy of a step's output would belong to no step of the pipeline


def bound(value: Any) -> Any:
    """Return an input as it is, or wrapped where it has no value of its own."""
    if _is_search_expression(value):
        return Bound(value, _type_of_search(value), searched=True)
    return Bound(value, binding_type(value)) if is_binding(value) else value


def bindings_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what inputs are bound to, of those that are."""
    return {name: value.value for name, value in inputs.items() if isinstance(value, Bound)}


def has_search(inputs: Mapping[str, Any]) -> bool:
    """Return whether an input is a search expression."""
    return any(isinstance(value, Bound) and value.searched for value in inputs.values())


def _is_search_expression(value: Any) -> bool:
    if "azure.ai.ml" not in sys.modules:  # nobody has such an object, and the import takes seconds
        return False
    from azure.ai.ml import sweep

    kinds = (
        *(sweep.Choice, sweep.Randint, sweep.Uniform, sweep.LogUniform, sweep.Normal, sweep.LogNormal),
        *(sweep.QUniform, sweep.QLogUniform, sweep.QNormal, sweep.QLogNormal),
    )
    return isinstance(value, kinds)


def _type_of_search(value: Any) -> str:
    from azure.ai.ml import sweep

    if isinstance(value, sweep.Choice):
        return LITERALS.get(type((value.values or [0.0])[0]), "string")
    return "integer" if isinstance(value, sweep.Randint) else "number"
