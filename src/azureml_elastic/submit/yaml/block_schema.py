"""The JSON schema of a job file for editors, from the models and their docstrings."""

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
        "how the nodes reach Azure ML: fan_out is a pipeline of single-node jobs, gang one job whose nodes start "
        "together, service one job that the service itself lets grow; null takes fan_out for more than one node."
    ),
    "pools": "node pools in the order of preference, in place of compute.",
}
"""Fields that no docstring describes for who writes YAML."""

_DESCRIPTION = "A standard command job of Azure ML, and one block that makes it elastic."
_DURATION = "seconds, or text such as PT5M or 00:05:00"


def job_schema(job: type[BaseModel] = ElasticCommandJob) -> dict[str, Any]:
    """Return the schema of a job file: the block in detail; whatever else a command job has is open.

    Azure ML's own schema of command jobs allows no further fields, so it cannot be a part of this one.

    Args:
        job: the model of the job.
    """
    block = block_model(job).model_json_schema(schema_generator=_Schema, ref_template="#/definitions/{model}")
    definitions = block.pop("$defs", {})
    known = described(job) | described(ElasticResources) | _OWN
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
                "description": "What makes the job elastic; the other fields are those of any command job.",
            },
        },
        "required": ["command", "environment", BLOCK],
        "definitions": definitions,
    }


def schema_text() -> str:
    """Return the schema as it is published: JSON, indented."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


def described(model: type[BaseModel]) -> dict[str, str]:
    """Return what the docstring of a model says about each of its fields.

    Args:
        model: whose docstring has a section of arguments.
    """
    text = inspect.getdoc(model) or ""
    _, _, section = text.partition("Args:\n")
    return {match["name"]: _plain(match["text"]) for match in _ENTRY.finditer(section)}


def _summary(model: type[BaseModel]) -> str:
    return _plain((inspect.getdoc(model) or "").partition("\n\n")[0])


def _plain(text: str) -> str:
    """Return a docstring's text without its marks and line ends, and with YAML's word for nothing."""
    bare = _ROLE.sub(lambda match: match[1] or match[2] or match[3], " ".join(text.split()))
    return re.sub(r"\bNone\b", "null", bare)


class _Schema(GenerateJsonSchema):
    """Descriptions from the docstrings, durations as they may be written, and no titles."""

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        """Return what pydantic accepts for a duration."""
        del schema
        return {"type": ["number", "string"], "description": _DURATION}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Return a union one of whose members is chosen by a field, which then must be given."""
        made = super().tagged_union_schema(schema)
        field = made.pop("discriminator", {}).get("propertyName")
        return made | {"oneOf": [{"allOf": [one], "required": [field]} for one in made["oneOf"]]}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Return a model's schema with the words of its docstring."""
        made = super().model_schema(schema)
        model = schema["cls"]
        made["description"] = _summary(model)
        made.pop("title", None)
        told = described(model)
        for name, field in made.get("properties", {}).items():
            field.pop("title", None)
            if name in told:
                field["description"] = told[name]
            if isinstance(field.get("default"), Mapping):
                del field["default"]  # said by the fields of the model itself
        return made
