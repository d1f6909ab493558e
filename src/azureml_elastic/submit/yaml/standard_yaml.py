"""An elastic job as standard YAML, for ``az ml job create -f`` and azure-ai-ml's ``load_job``.

The YAML that azure-ai-ml itself dumps cannot be submitted: booleans become numbers, and local paths become names of
assets. This module therefore writes the compiled job, and loads the result again to detect any loss.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit import node_launch
from azureml_elastic.submit.yaml.entity_document import PathFormat, document_of, real_path
from azureml_elastic.submit.yaml.sdk_errors import readable

with needs_extra("PyYAML", "submit"):
    import yaml

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = ["standard_yaml"]

_LINE_ENDS = re.compile("[\\x85\\u2028\\u2029]")


def standard_yaml(
    job: ElasticCommandJob,
    *,
    folder: str | os.PathLike[str] | None = None,
    absolute: Iterable[str] = (),
    runtime: str | os.PathLike[str] | None = None,
) -> str:
    """Return the compiled job as YAML: a pipeline job for ``fan_out``, else a command job.

    Args:
        job: job to compile.
        folder: folder of the file, which local paths become relative to. ``None`` makes them absolute.
        absolute: paths that stay absolute regardless.
        runtime: copy of the library for the nodes, replacing the one in the cache; see ``delivery="ship"``.
    """
    kept = frozenset(real_path(path, named=named) for path in absolute for named in (True, False))
    paths = PathFormat(None if folder is None else Path(folder), kept)
    absent = frozenset(name for name, output in job.outputs.items() if output is None)
    entity = job.compile()
    document = document_of(entity, paths, absent)
    if runtime is not None and node_launch.RUNTIME in document.get("inputs", {}):
        document["inputs"][node_launch.RUNTIME]["path"] = paths.format(str(runtime))
    text = _dump(document)
    _check(text, entity, paths, absent)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """YAML dumper that writes multi-line text as literal blocks."""

    def represent_text(self, text: str) -> Any:
        style = "|" if "\n" in text else None
        if _LINE_ENDS.search(text):  # only double quotes preserve them in PyYAML
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _dump(document: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
    return text


def _check(text: str, entity: Any, paths: PathFormat, absent: Collection[str]) -> None:
    """Check that azure-ai-ml loads the text as a job that is equal to the entity."""
    from azure.ai.ml import load_job
    from azure.ai.ml.exceptions import ValidationException
    from marshmallow.exceptions import ValidationError as SchemaError

    folder = Path(os.path.realpath(paths.folder or Path()))
    meant = document_of(entity, replace(paths, resolved=True), absent)
    try:
        loaded = load_job(io.StringIO(text), relative_origin=str(folder / "job.yml"))
    except (ValidationException, SchemaError) as error:
        variables = [one.get("environment_variables") for one in (meant, *meant.get("jobs", {}).values())]
        message = readable(error, {"environment_variables": variables})
        raise SubmitError(
            f"The YAML of a job cannot express all of this job. azure-ai-ml's load_job reports: {message}"
        ) from None
    read = document_of(loaded, replace(paths, resolved=True, base=folder), absent)
    for one in (meant, read):
        one.get("inputs", {}).get(node_launch.RUNTIME, {}).pop("path", None)  # differs for a copy
    path = _difference(meant, read, "")
    if path is not None:
        raise SubmitError(
            f"The YAML of a job cannot express this job's {path}: azure-ai-ml's load_job reads it differently. Leave "
            "it out, or submit the job from Python."
        )


def _difference(one: Any, other: Any, path: str) -> str | None:
    """Return the dotted path of the first difference between two documents; ``None`` if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            found = _difference(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if one == other and type(one) is type(other) else path
