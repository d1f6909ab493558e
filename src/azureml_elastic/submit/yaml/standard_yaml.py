"""An elastic job as standard YAML, for ``az ml job create -f`` and azure-ai-ml's ``load_job``.

The result is loaded again, to detect whatever the YAML or azure-ai-ml's dump has lost.

azure-ai-ml's errors about invalid job files are converted to sentences. Its messages contain JSON, whose strings
contain further messages, with one entry per alternative for a field that accepts several types.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.conversion import FIELDS_OF_COMMAND, FIELDS_OF_RESOURCES
from azureml_elastic.submit.yaml.entity_document import PathFormat, document_of, documents_of_nodes

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob
    from azureml_elastic.submit.yaml.pipeline_file import ElasticPipeline

_BINDING = "not a data binding string"
_NOT_IN = " passed is not in set"
_CHOICE = re.compile(rf"Value (?P<value>.*){_NOT_IN} \[(?P<names>.*)\]", re.DOTALL)
_NAMES = sorted(FIELDS_OF_COMMAND | {"limits", "queue_settings", "resources"} | set(FIELDS_OF_RESOURCES))
_MASK = "***"
_SHORTEST_SECRET = 4

with needs_extra("PyYAML", "submit"):
    import yaml


_LINE_ENDS = re.compile("[\\x85\\u2028\\u2029]")


def readable(error: Exception, document: Mapping[str, Any], where: str = "") -> str:
    """Return an error as sentences, without the values of the job's environment variables.

    Args:
        where: path of the document in its file, with a dot at its end.
    """
    faults = [_sentence(f"{where}{path}".rstrip("."), message) for path, message in _faults(str(error), "")]
    text = " ".join(one if one.endswith((".", "?")) else f"{one}." for one in dict.fromkeys(faults))
    for secret in sorted(_texts(document.get("environment_variables")), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def _sentence(path: str, message: str) -> str:
    if message == "Unknown field.":
        near = difflib.get_close_matches(path.rpartition(".")[2], _NAMES, 1)
        return f"{path} is no field of a command job{f'; did you mean {near[0]}?' if near else ''}"
    message = _CHOICE.sub(lambda match: f"{match['value']} is none of {match['names']}", message)
    return f"{path}: {message}" if path else message


def _faults(message: str, path: str) -> Iterator[tuple[str, str]]:
    start = message.find("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(message, max(start, 0))
    except ValueError:
        found = None
    if start < 0 or not isinstance(found, dict):
        yield from _leaves(message.strip().split("\n\n")[0], path)
    elif isinstance(found.get("errors"), list):
        for one in found["errors"]:
            yield from _faults(str(one.get("message", "")), path if one.get("path") in {"*", None} else one["path"])
    else:
        yield from _leaves(found, path)


def _leaves(found: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, dict):
        for key, value in found.items():
            part = "" if key in {"_schema", "value"} else str(key)
            yield from _leaves(value, ".".join(text for text in (path, part) if text))
    elif isinstance(found, list) and found:
        kinds = [list(_leaves(one, path)) for one in found if _BINDING not in str(one)]
        yield from _one_of(kinds or [list(_leaves(found[0], path))])
    elif isinstance(found, str) and found.startswith("{'"):
        yield from _leaves(_python(found), path)
    else:
        yield path, " ".join(str(found).split())


def _one_of(kinds: list[list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield the faults of a value that accepts several types.

    If every type is an enumeration, their names are combined; otherwise the faults of the first type are yielded, which
    is the most likely one.
    """
    choices = [_CHOICE.fullmatch(faults[0][1]) if len(faults) == 1 else None for faults in kinds]
    if len({faults[0][0] for faults in kinds}) == 1 and all(choices):
        names = ", ".join(choice["names"] for choice in choices if choice is not None)
        yield kinds[0][0][0], _CHOICE.sub(lambda match: f"Value {match['value']}{_NOT_IN} [{names}]", kinds[0][0][1])
    else:
        yield from kinds[0]


def _python(text: str) -> Any:
    """Return the first of the faults in a text of Python literals."""
    first, more, _ = text.partition("}; ")
    try:
        return ast.literal_eval(f"{first}}}" if more else first)
    except (SyntaxError, ValueError):
        return f" {text}"


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a value that are long enough to be secrets."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    elif value is not None and len(str(value)) >= _SHORTEST_SECRET:
        yield str(value)


def standard_yaml(job: ElasticCommandJob, paths: PathFormat | None = None, runtime: Path | None = None) -> str:
    """Return the compiled job as YAML: a pipeline job for ``fan_out``, else a command job.

    Args:
        paths: format of local paths, by default absolute.
        runtime: copy of the library for the nodes, replacing the one in the cache; see ``delivery="ship"``.
    """
    paths = paths or PathFormat()
    entity = job.compile()
    document = document_of(entity, paths)
    _replace_runtime(document, paths, runtime)
    text = _dump(document)
    _check(text, document_of(entity, replace(paths, resolved=True)), document_of, paths)
    return text


def pipeline_yaml(
    pipeline: ElasticPipeline, document: Mapping[str, Any], paths: PathFormat, runtime: Path | None
) -> str:
    """Return a pipeline with elastic steps as YAML.

    Args:
        document: standard YAML of the pipeline, whose plain steps are taken as they are.
        runtime: see :func:`standard_yaml`.
    """
    nodes = {name: pipeline.job.jobs[name] for names in pipeline.steps.values() for name in names}
    elastic = documents_of_nodes(nodes, paths)
    for node in elastic.values():
        _replace_runtime(node, paths, runtime)
    steps: dict[str, Any] = {}
    for name, step in document["jobs"].items():
        steps |= {each: elastic[each] for each in pipeline.steps[name]} if name in pipeline.steps else {name: step}
    text = _dump({**document, "jobs": steps})
    meant = {"jobs": documents_of_nodes(nodes, replace(paths, resolved=True))}

    def read(loaded: Any, there: PathFormat) -> dict[str, Any]:
        return {"jobs": documents_of_nodes({name: loaded.jobs[name] for name in nodes}, there)}

    _check(text, meant, read, paths)
    return text


def _replace_runtime(holder: dict[str, Any], paths: PathFormat, runtime: Path | None) -> None:
    if runtime is not None and node_launch.RUNTIME in holder.get("inputs", {}):
        holder["inputs"][node_launch.RUNTIME] = {
            **holder["inputs"][node_launch.RUNTIME],
            "path": paths.format(str(runtime)),
        }


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    def represent_text(self, text: str) -> Any:
        style = "|" if "\n" in text else None
        if _LINE_ENDS.search(text):  # only double quotes preserve them in PyYAML
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _dump(document: Mapping[str, Any]) -> str:
    # PyYAML would fold commands at their spaces, which a reader takes for several lines.
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
    return text


def _check(
    text: str, meant: Mapping[str, Any], document: Callable[[Any, PathFormat], dict[str, Any]], paths: PathFormat
) -> None:
    """Check that azure-ai-ml loads the text as a job with the same document, apart from the library's copy."""
    from azure.ai.ml import load_job
    from azure.ai.ml.exceptions import ValidationException
    from marshmallow.exceptions import ValidationError as SchemaError

    folder = Path(os.path.realpath(paths.folder or Path()))
    try:
        loaded = load_job(io.StringIO(text), relative_origin=str(folder / "job.yml"))
    except (ValidationException, SchemaError) as error:
        variables = [one.get("environment_variables") for one in (meant, *meant.get("jobs", {}).values())]
        message = readable(error, {"environment_variables": variables})
        raise SubmitError(
            f"The YAML of a job cannot express all of this job. azure-ai-ml's load_job reports: {message}"
        ) from None
    read = document(loaded, replace(paths, resolved=True, base=folder))
    for one in (meant, *meant.get("jobs", {}).values(), read, *read.get("jobs", {}).values()):
        copied = one.get("inputs", {}).get(node_launch.RUNTIME)
        if isinstance(copied, dict):
            copied.pop("path", None)
    path = _difference(meant, read, "")
    if path is not None:
        raise SubmitError(
            f"The YAML of a job cannot express this job's {path}: azure-ai-ml's load_job reads it differently. Leave "
            "it out, or submit the job from Python."
        )


def _difference(one: Any, other: Any, path: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            found = _difference(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if one == other and type(one) is type(other) else path
