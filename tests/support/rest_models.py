"""Checks of request bodies against the client models of the service's API that azure-ai-ml ships.

Newer releases of azure-ai-ml have models with annotations, older ones have msrest's tables of attributes; both are read
into the same description. The steps of a pipeline are free-form in both.
"""

from __future__ import annotations

import enum
import importlib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

EXCEPTIONS = {
    "properties.inputs.*.value",  # any literal, though older models require a letter or a digit
    "properties.objective.goal",  # in lower case
    "properties.outputs.*.assetVersion",
    "properties.parentJobName",
    "properties.queueSettings.priority",
    "properties.resources",  # of a sweep
    "properties.resources.locations",
    "properties.resources.maxInstanceCount",
    "properties.trial.resources.maxInstanceCount",
}
"""Fields that azure-ai-ml submits for its own jobs, too, and that not all models of the API versions in use have."""

_DURATION = re.compile(r"P(?=.)(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?")
_SIMPLE = {"str": str, "int": int, "bool": bool, "float": float}


@dataclass(frozen=True)
class Attribute:
    """A field of a model.

    Args:
        kind: type: a class, ``"duration"``, ``("list", kind)``, ``("dict", kind)``, or ``None`` for any value.
        required: whether bodies must have it.
        pattern: regular expression for its text.
    """

    kind: Any
    required: bool = False
    pattern: str | None = None


def problems_of_job(body: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the body of a request that creates a job; empty if nothing is."""
    models = _models()
    found = _problems(models.JobBase, body, models, "")
    return sorted(text for path, text in found if not any(fnmatch(path, known) for known in EXCEPTIONS))


def enumerations_are_known() -> bool:
    """Return whether the models say which texts a field may have; msrest's tables have plain text there."""
    return not hasattr(_models().JobBase, "_attribute_map")


def _models() -> Any:
    for name in ("arm_ml_service", "v2025_01_01_preview"):
        try:
            return importlib.import_module(f"azure.ai.ml._restclient.{name}.models")
        except ModuleNotFoundError:
            continue
    raise AssertionError("azure-ai-ml has no models of jobs where they were")


def _problems(model: Any, body: Mapping[str, Any], models: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each problem below ``path``, and what is wrong there."""
    model = _subtype(model, body)
    attributes = _attributes(model, models)
    for name in body.keys() - attributes.keys():
        yield f"{path}{name}", f"{path}{name} is no field of {model.__name__}"
    for name, attribute in attributes.items():
        here = f"{path}{name}"
        if body.get(name) is None:
            if attribute.required:
                yield here, f"{here} is missing"
            continue
        yield from _problems_of_value(attribute.kind, body[name], models, here)
        if attribute.pattern and not re.search(attribute.pattern, str(body[name])):
            yield here, f"{here}={body[name]!r} does not match {attribute.pattern}"


def _problems_of_value(kind: Any, value: Any, models: Any, path: str) -> Iterator[tuple[str, str]]:
    wrong = path, f"{path}={value!r} is not of the type {kind}"
    if kind is None:
        return
    if kind == "duration":
        if not (isinstance(value, str) and _DURATION.fullmatch(value)):
            yield wrong
    elif isinstance(kind, tuple):
        container = list if kind[0] == "list" else dict
        if not isinstance(value, container):
            yield wrong
            return
        for key, one in enumerate(value) if container is list else value.items():
            if one is not None:
                yield from _problems_of_value(kind[1], one, models, f"{path}.{key}")
    elif issubclass(kind, enum.Enum):
        if value not in {each.value for each in kind}:
            yield wrong
    elif kind in _SIMPLE.values():
        numbers = kind is float and type(value) is int
        if type(value) is not kind and not numbers:
            yield wrong
    elif isinstance(value, dict):
        yield from _problems(kind, value, models, f"{path}.")
    else:
        yield wrong  # a model, and no object


def _subtype(model: Any, body: Mapping[str, Any]) -> Any:
    """Return the model that the body's discriminator selects."""
    for attribute, choices in vars(model).get("_subtype_map", {}).items():
        name = model._attribute_map[attribute]["key"]
        if body.get(name) in choices:
            return _subtype(getattr(_models(), choices[body[name]]), body)
    for field in vars(model).get("__mapping__", {}):
        if field in body.values():
            return model.__mapping__[field]
    return model


def _attributes(model: Any, models: Any) -> dict[str, Attribute]:
    """Return the fields of a model that may be sent, by their names in JSON."""
    if hasattr(model, "_attribute_map"):
        return {
            entry["key"]: Attribute(
                _kind_of_text(entry["type"], models),
                model._validation.get(name, {}).get("required", False),
                model._validation.get(name, {}).get("pattern"),
            )
            for name, entry in model._attribute_map.items()
            if not model._validation.get(name, {}).get("readonly")
        }
    model({})  # completes its table of fields
    hints = typing.get_type_hints(model, localns={"_models": models})
    return {
        field._rest_name: Attribute(_kind_of_hint(hints[name]), not _is_optional(hints[name]))
        for name, field in model._attr_to_rest_field.items()
        if field._visibility != ["read"]
    }


def _kind_of_text(text: str, models: Any) -> Any:
    """Return the kind of a type in msrest's notation, such as ``[str]`` and ``{JobInput}``."""
    if text[0] in "[{":
        return ("list" if text[0] == "[" else "dict", _kind_of_text(text[1:-1], models))
    if text in {"object", "iso-8601"}:
        return None
    return "duration" if text == "duration" else _SIMPLE.get(text) or getattr(models, text)


def _kind_of_hint(hint: Any) -> Any:
    """Return the kind of an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        kinds = [each for each in arguments if each is not type(None)]
        enums = [each for each in kinds if isinstance(each, type) and issubclass(each, enum.Enum)]
        return enums[0] if enums else _kind_of_hint(kinds[0]) if len(kinds) == 1 else None
    if origin in {list, dict}:
        return origin.__name__, _kind_of_hint(arguments[-1])
    if origin is typing.Literal:
        return type(arguments[0])
    if isinstance(hint, type) and (hint in _SIMPLE.values() or issubclass(hint, enum.Enum) or _is_model(hint)):
        return hint
    return "duration" if getattr(hint, "__name__", "") == "timedelta" else None


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _is_model(kind: type) -> bool:
    return issubclass(kind, Mapping) and kind.__module__.startswith("azure.")
