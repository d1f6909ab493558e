"""JSON schema of job files for editors, generated from the models and their docstrings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from azureml_elastic.config.resources import ElasticResources
from azureml_elastic.submit.job import ElasticCommandJob
from azureml_elastic.submit.yaml.elastic_block import BLOCK, block_model

__all__ = ["described", "job_schema", "schema_text"]

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
