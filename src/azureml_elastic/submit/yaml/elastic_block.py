"""The ``elastic:`` block of a job file: its fields, and messages about invalid ones.

The block has the settings that a standard command job lacks: the node counts, and every field of ``ElasticCommandJob``
that ``azure.ai.ml.command()`` does not have. It is derived from these models, so new fields appear automatically. So is
the JSON schema of job files for editors.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema

from azureml_elastic.config.base import ConfigModel, meant
from azureml_elastic.config.resources import ElasticResources, NodePool
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.conversion import FIELDS_OF_COMMAND, FIELDS_OF_RESOURCES
from azureml_elastic.submit.job import ElasticCommandJob

BLOCK = "elastic"
"""The key of the block in a job file."""

COUNTS = tuple(name for name in ElasticResources.model_fields if name not in FIELDS_OF_RESOURCES)
"""The fields of ``ElasticResources`` in the block; the others belong to the standard ``resources:``."""

ELSEWHERE = {"timeout": "limits.timeout", "job_tier": "queue_settings.job_tier", "priority": "queue_settings.priority"}
"""Paths in a job file of the elastic job's fields, where the names differ."""

_OUTSIDE = FIELDS_OF_COMMAND - {"distribution"} | {"resources", "type"}
_SHOWN = re.compile(r"[\w .:@-]{0,60}", re.ASCII)
_MOST = 5
_MESSAGES = {
    "time_delta_parsing": "a duration: a number of seconds, or text such as '10m' or '1h30m'",
    "model_type": "a block of fields",
    "model_attributes_type": "a block of fields",
    "tuple_type": "a list",
}
"""Replacements for pydantic's messages, in terms of YAML instead of Python types."""

_ENTRY = re.compile(r"^    (?P<name>\w+): (?P<text>.*(?:\n {6,}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`|``([^`]+)``|\*(\w+)\*")
_OWN = {
    "placement": (
        "kind of Azure ML job: fan_out is a pipeline of single-node jobs, gang one job whose nodes start together, "
        "service one job that Azure ML itself grows; null selects fan_out for more than one node and gang otherwise."
    ),
    "pools": "node pools in the order of preference, instead of compute.",
}
"""Descriptions of fields whose docstrings do not apply to YAML."""

_DESCRIPTION = "A standard command job of Azure ML, and one block that makes it elastic."
_DURATION = "seconds, or text such as 10m or 1h30m"


@functools.cache
def block_model() -> type[ConfigModel]:
    """Return the model of the block, all of whose fields are optional."""
    fields: dict[str, Any] = {
        name: (ElasticResources.model_fields[name].annotation | None, None)  # type: ignore[operator]
        for name in COUNTS
    }
    fields["pools"] = (tuple[NodePool, ...] | None, Field(default=None))
    for name, info in ElasticCommandJob.model_fields.items():
        if name not in _OUTSIDE:
            fields[name] = (info.annotation, info)
    return create_model("ElasticBlock", __base__=ConfigModel, **fields)


def read_block(block: Any, where: str = "") -> ConfigModel:
    """Validate a block, and return it as a model.

    Args:
        where: path in the file of what has the block, with a dot at its end.

    Raises:
        SubmitError: a field is unknown or invalid; the message has its dotted path but not the name of the file.
    """
    given = {} if block is None else block
    model, root = block_model(), f"{where}{BLOCK}"
    if not isinstance(given, dict):
        kind = "text" if isinstance(given, str) else type(given).__name__
        raise SubmitError(f"{root} is a {kind}, not a block of fields. {_fields_text(root, model)}")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise SubmitError(" ".join(wrong_fields(error, given, model, root))) from None


def wrong_fields(error: ValidationError, given: Mapping[str, Any], model: type[BaseModel], root: str) -> list[str]:
    """Return a sentence per invalid field, with its dotted path below ``root`` and, if it is unknown, a suggestion."""
    found: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path(detail["loc"], given, missing=detail["type"] == "missing"), []).append(detail)
    # pydantic reports the errors of all members of a union: the one that was meant has failed deepest.
    deepest = [
        path for path in found if not any(len(other) > len(path) and other[: len(path)] == path for other in found)
    ]
    return [_sentence(path, found[path], given, model, root) for path in deepest[:_MOST]]


def wanted(details: Sequence[ErrorDetails]) -> str:
    """Return the expected value of a field; for a union, that of its members combined."""
    ours = [detail["msg"].removeprefix("Value error, ") for detail in details if detail["type"] == "value_error"]
    if ours:
        return ours[0]
    begin = "Input should be "
    texts = dict.fromkeys(_MESSAGES.get(detail["type"], detail["msg"]).removeprefix(begin) for detail in details)
    return ("should be " if all(detail["msg"].startswith(begin) for detail in details) else "") + " or ".join(texts)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models within a type annotation, such as ``tuple[NodePool, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def _path(location: Sequence[str | int], given: Any, *, missing: bool) -> tuple[str | int, ...]:
    """Return the document's keys within an error location, which also has the names of union members."""
    path: list[str | int] = []
    here = given
    for number, part in enumerate(location):
        inside = isinstance(here, dict) and part in here
        if inside or (isinstance(here, list) and isinstance(part, int)):
            here = here[part]
            path.append(part)
        elif missing and number == len(location) - 1:
            path.append(part)
    return tuple(path)


def _sentence(
    path: tuple[str | int, ...],
    details: Sequence[ErrorDetails],
    given: Mapping[str, Any],
    model: type[BaseModel],
    root: str,
) -> str:
    dotted, block = (".".join(str(part) for part in (root, *keys) if part != "") for keys in (path, path[:-1]))
    first = details[0]
    holders = _models_at(model, given, path[:-1])
    if first["type"] == "extra_forbidden" and holders:
        there = _meant(str(path[-1]), block, holders[0], root, model)
        return f"{dotted} is no field{there} {_fields_text(block, holders[0])}"
    if first["type"] == "missing":
        return f"{dotted} is missing."
    if first["type"] in {"union_tag_not_found", "union_tag_invalid"}:
        key = str(first.get("ctx", {}).get("discriminator", "")).strip("'")
        tags = " or ".join(str(one.model_fields[key].default) for one in _models_at(model, given, path))
        return f"{dotted}.{key} selects the policy: give {tags}."
    return f"{dotted}{_shown(first['input'])}: {wanted(details)}."


def _shown(value: Any) -> str:
    """Return a value for a message; empty if it is long or could be a key or a signature."""
    if value is None or isinstance(value, bool | int | float):
        return f"={json.dumps(value)}"
    return f"={value!r}" if isinstance(value, str) and _SHOWN.fullmatch(value) else ""


def _models_at(model: type[BaseModel], given: Any, path: Sequence[str | int]) -> list[type[BaseModel]]:
    models, here = [model], given
    for part in path:
        here = here[part]
        if isinstance(part, int):
            continue
        fields = [one.model_fields[part] for one in models if part in one.model_fields]
        models = [one for info in fields for one in models_in(info.annotation)]
        tags = {info.discriminator for info in fields if isinstance(info.discriminator, str)}
        for tag in tags & (here.keys() if isinstance(here, dict) else set()):
            models = [one for one in models if one.model_fields[tag].default == here[tag]] or models
    return models


def _meant(name: str, block: str, holder: type[BaseModel], root: str, model: type[BaseModel]) -> str:
    """Return a suggestion for an unknown field name, as the end of a sentence."""
    if block == root and (name in FIELDS_OF_RESOURCES or name == "instance_count"):
        return f"; it belongs outside the block, as resources.{name}."
    if block == root and name in _OUTSIDE:
        return "; it belongs outside the block, as in any command job."
    found = [path for path in (*_paths(holder, block), *_paths(model, root)) if path.rpartition(".")[2] == name]
    if found:
        return f"; it belongs to {found[0].rpartition('.')[0]}."
    return meant(name, holder) or "."


def _paths(model: type[BaseModel], block: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield f"{block}.{name}"
        for deeper in models_in(info.annotation):
            yield from _paths(deeper, f"{block}.{name}")


def _fields_text(block: str, model: type[BaseModel]) -> str:
    return f"The fields of {block} are {', '.join(sorted(model.model_fields.keys() - {'type'}))}."


def job_schema() -> dict[str, Any]:
    """Return the schema of a job file: the elastic block in detail; the fields of the command job are unrestricted.

    Azure ML's own schema of command jobs forbids additional fields and therefore cannot be included.
    """
    block = block_model().model_json_schema(schema_generator=_Schema, ref_template="#/definitions/{model}")
    definitions = block.pop("$defs", {})
    known = described(ElasticCommandJob) | described(ElasticResources) | _OWN
    for name, field in block["properties"].items():
        if name in known:
            field["description"] = known[name]
        field.pop("title", None)
    block.pop("title", None)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Elastic job of Azure ML",
        "description": _DESCRIPTION,
        "type": "object",
        "properties": {
            "type": {"const": "command"},
            BLOCK: {
                **block,
                "description": "The elastic settings of the job; all other fields are those of any command job.",
            },
        },
        "required": ["command", "environment", BLOCK],
        "definitions": definitions,
    }


def schema_text() -> str:
    """Return the schema as indented JSON."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


def described(model: type[BaseModel]) -> dict[str, str]:
    """Return the descriptions of a model's fields from the ``Args`` section of its docstring."""
    text = inspect.getdoc(model) or ""
    _, _, section = text.partition("Args:\n")
    return {match["name"]: _plain(match["text"]) for match in _ENTRY.finditer(section)}


def _plain(text: str) -> str:
    """Return a docstring's text without markup and line breaks, and with ``null`` for ``None``."""
    bare = _ROLE.sub(lambda match: match[1] or match[2] or match[3], " ".join(text.split()))
    return re.sub(r"\bNone\b", "null", bare)


class _Schema(GenerateJsonSchema):
    """Schema generator that describes fields by docstrings, accepts durations as written in YAML, and omits titles."""

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        """Return the schema of the values that pydantic accepts as durations."""
        del schema
        return {"type": ["number", "string"], "description": _DURATION}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Return the schema of a discriminated union, with the discriminator required."""
        made = super().tagged_union_schema(schema)
        field = made.pop("discriminator", {}).get("propertyName")
        # pydantic demands the tag although each member has a default for it, by which its schema does not require it.
        return made | {"oneOf": [{"allOf": [one], "required": [field]} for one in made["oneOf"]]}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Return a model's schema with the descriptions of its docstring."""
        made = super().model_schema(schema)
        model = schema["cls"]
        made["description"] = _plain((inspect.getdoc(model) or "").partition("\n\n")[0])
        made.pop("title", None)
        descriptions = described(model)
        for name, field in made.get("properties", {}).items():
            field.pop("title", None)
            if name in descriptions:
                field["description"] = descriptions[name]
            if isinstance(field.get("default"), Mapping):
                del field["default"]  # the nested model's fields have the defaults
        return made
