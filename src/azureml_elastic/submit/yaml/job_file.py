"""Elastic jobs as YAML files: any command job of Azure ML, with one ``elastic:`` block.

The block is removed and azure-ai-ml loads the rest, so that every field of a command job keeps its meaning.

Values may be overridden, as by ``--set elastic.max_instance_count=12``.
"""

from __future__ import annotations

import copy
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.errors import CommandError, SubmitError, needs_extra
from azureml_elastic.submit.conversion import trial_of
from azureml_elastic.submit.fields import given_fields, resources_of_pools
from azureml_elastic.submit.yaml.elastic_block import BLOCK, COUNTS, ELSEWHERE, block_model, read_block, wanted
from azureml_elastic.submit.yaml.standard_yaml import readable
from azureml_elastic.submit.yaml.yaml_terms import translated_errors

if TYPE_CHECKING:
    from azure.ai.ml.entities import Sweep

    from azureml_elastic.submit.job import ElasticCommandJob

with needs_extra("PyYAML", "submit"):
    import yaml


_KEY = re.compile(r'"(?P<quoted>[^"]*)"|(?P<plain>[^."=]+)')
_Made = TypeVar("_Made")
PIPELINE = "pipeline"
SWEEP = "sweep"
_SHORTEST = f"\n{BLOCK}:\n  max_instance_count: 4"

_LITERALS: dict[str, Any] = {"boolean": True, "integer": 4, "number": 0.1, "string": "a text"}
"""The types of literals, with an example of each."""


def apply_overrides(document: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a document with values set by overrides, later ones taking precedence.

    Missing blocks are created; field names are not validated.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for override in overrides:
        path, value = parse_override(override)
        _set(changed, path, value)
    return changed


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Return the path and the value of an override.

    Args:
        override: ``a.b=c``: keys separated by dots, in double quotes if they contain dots, with indices for entries of
            lists; and a value in single-line YAML. An empty value is the empty string.

    Raises:
        SubmitError: there is no ``=`` or no key, or the value is no YAML. The message never contains the value.
    """
    path, equals, text = _split(override)
    if not path or not equals:
        raise SubmitError(
            f"--set {override.partition('=')[0]!r} sets nothing. Give a path and a value, such as "
            "elastic.max_instance_count=12 or inputs.lr=0.5."
        )
    try:
        return path, "" if not text.strip() else yaml.safe_load(text)
    except yaml.YAMLError:
        raise SubmitError(
            f"The value that --set gives to {'.'.join(path)} is no YAML. Put text with special characters in quotes, "
            "as in --set 'tags.note=\"a: b\"'."
        ) from None


def _split(override: str) -> tuple[tuple[str, ...], str, str]:
    """Return the keys, ``=`` and the text of the value; no keys if they cannot be parsed."""
    keys: list[str] = []
    position = -1
    while position < 0 or override.startswith(".", position):
        match = _KEY.match(override, position + 1)
        if match is None:
            return (), "", ""
        keys.append(match["plain"] if match["quoted"] is None else match["quoted"])
        position = match.end()
    return tuple(keys), override[position : position + 1], override[position + 1 :]


def _set(document: dict[str, Any], path: Sequence[str], value: Any) -> None:
    here: Any = document
    for number, name in enumerate(path):
        key: str | int = name
        if isinstance(here, list):
            key = _index(here, path[: number + 1])
        elif not isinstance(here, dict):
            raise SubmitError(
                f"--set {'.'.join(path)}: {'.'.join(path[:number])} is a {type(here).__name__}, which has no {key!r}. "
                f"Set {'.'.join(path[:number])} as a whole, or correct the path."
            )
        if number == len(path) - 1:
            here[key] = value
        elif isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]


def _index(entries: list[Any], path: Sequence[str]) -> int:
    if not path[-1].isdecimal() or int(path[-1]) >= len(entries):
        raise SubmitError(
            f"--set {'.'.join(path)}: {'.'.join(path[:-1])} is a list of {len(entries)}, whose entries are 0 to "
            f"{len(entries) - 1}. Give one of these numbers, or set the list as a whole, as in [a, b]."
        )
    return int(path[-1])


def load_elastic_job(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> ElasticCommandJob:
    """Load an elastic job from a YAML file: a standard command job with one ``elastic:`` block.

    As in azure-ai-ml, local paths in the file are relative to its folder.

    Args:
        overrides: values to set first, each as ``a.b=c``, such as ``elastic.max_instance_count=12``.

    Raises:
        SubmitError: the file cannot be read, or a field is invalid; the message has the file and the field's path.
        CommandError: the command has a launcher whose options cannot be translated.
        MissingExtra: azure-ai-ml is not installed.
    """
    return loaded_file(path, overrides, _job)


def load_elastic_sweep(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Sweep:
    """Load a sweep from a YAML file: a standard sweep job whose ``trial`` has an ``elastic:`` block.

    Each trial is a run of its own. Otherwise as :func:`load_elastic_job`, also in its errors.

    Args:
        overrides: values to set first, each as ``a.b=c``, such as ``trial.elastic.max_instance_count=12``.
    """
    return loaded_file(path, overrides, _sweep)


def loaded_file(
    path: str | os.PathLike[str], overrides: Iterable[str], make: Callable[[Mapping[str, Any], Path], _Made]
) -> _Made:
    """Return what a function makes of a file's content, and put the file's name before errors."""
    file = Path(path)
    document = read_document(file, overrides)
    try:
        return make(document, file)
    except (SubmitError, CommandError) as error:
        raise type(error)(f"{file}: {error}") from None


def read_document(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the content of a job file with overrides applied, without validating its fields."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SubmitError(f"{file} cannot be read ({why}). Give the YAML file of a job.") from error
    try:
        _reject_duplicates(yaml.compose(text, Loader=yaml.SafeLoader), set())
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SubmitError(f"{file}{_syntax_error(error, text)}") from None  # the original error quotes the line
    if not isinstance(document, dict):
        raise SubmitError(f"{file} is no job: a job file is a block of fields, such as 'command: python train.py'.")
    return apply_overrides(document, overrides)


def _reject_duplicates(node: Any, seen: set[int]) -> None:
    """Check that no block has a field twice, of which PyYAML would silently drop the first."""
    if id(node) in seen:  # an alias is the same node again, and a block may contain itself by one
        return
    seen.add(id(node))
    names = set()
    for entry in node.value if isinstance(node, yaml.CollectionNode) else ():
        for one in entry if isinstance(entry, tuple) else (entry,):
            _reject_duplicates(one, seen)
        key = entry[0] if isinstance(entry, tuple) else None
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            names.add(key.value)


def _syntax_error(error: yaml.YAMLError, text: str) -> str:
    """Return the position and cause of a syntax error, without the line itself, which may contain a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f", line {mark.line + 1}, column {mark.column + 1}: this is no YAML: {error.problem}."
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f", line {line}: this is no YAML: it has a character that must not be in it."
    return ": this is no YAML."


def _job(document: Mapping[str, Any], file: Path) -> ElasticCommandJob:
    kind = document.get("type", "command")
    if kind == SWEEP:
        raise SubmitError(
            f"type is {kind!r}: a sweep is submitted to a workspace, by 'azureml-elastic submit' or as what "
            "load_elastic_sweep() returns. It is neither compiled to a file nor run by --local. To run it on this "
            f"machine: azureml-elastic workspace start --pool CLUSTER=4 -- azureml-elastic submit {file}."
        )
    if kind == PIPELINE:
        raise SubmitError(
            f"type is {kind!r}: a pipeline is submitted to a workspace, by 'azureml-elastic submit' or as what "
            "load_elastic_pipeline() returns. To run it on this machine: azureml-elastic workspace start --pool "
            f"CLUSTER=4 -- azureml-elastic submit {file}."
        )
    if kind != "command":
        raise SubmitError(
            f"type is {kind!r}, but only jobs of 'type: command', steps of pipelines and trials of sweeps are elastic."
        )
    _check_block(document, "")
    rest = without_block(document)
    with translated_errors():
        return converted(rest, document[BLOCK], lambda: load_plain(rest, file))


def _sweep(document: Mapping[str, Any], file: Path) -> Sweep:
    trial = document.get("trial")
    if not isinstance(trial, dict):
        raise SubmitError("trial is no block. Write the command, code and environment of the trials in it.")
    if BLOCK in document:
        raise SubmitError(f"{BLOCK} belongs in the trial: block, whose jobs are elastic, as trial.{BLOCK}.")
    _check_block(trial, " in trial:")
    rest = {**document, "trial": without_block(trial)}
    loaded = trial_of(load_plain(rest, file))
    shared = {name: document[name] for name in ("compute", "inputs", "resources") if name in document}
    with translated_errors("trial."):
        job = converted({**rest["trial"], **shared}, trial[BLOCK], lambda: loaded.command_job, "trial.")
        if job.resources.placement is None:  # of a trial there is but one job
            job = job.with_options(resources={"placement": "gang"})
        return job.sweep(**loaded.options)


def _check_block(document: Mapping[str, Any], where: str) -> None:
    if BLOCK not in document:
        raise SubmitError(
            f"there is no {BLOCK}: block{where}, which sets how many nodes may train. The shortest is:{_SHORTEST}"
        )


def without_block(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job, or a part of one, without its block."""
    return {name: value for name, value in document.items() if name != BLOCK}


def converted(
    rest: Mapping[str, Any], block: Any, load: Callable[[], Any], where: str = "", **changes: Any
) -> ElasticCommandJob:
    """Return the job of a document and of its block.

    Args:
        load: function that returns the job of the document, which is called once its fields have been checked.
        where: path of the document in its file, with a dot at its end.
        **changes: fields of the elastic job, in place of those of the document.
    """
    from azureml_elastic.submit import ElasticCommandJob

    read = read_block(block, where)
    outside = "" if where == "trial." else where  # compute, inputs and resources are those of the sweep
    _check_variables(rest.get("environment_variables"), where)
    _check_literals(rest.get("inputs"), outside)
    _check_misplaced(rest, outside)
    given = given_fields(read)
    pools = given.pop("pools", None)
    if pools is not None and rest.get("compute") is not None:
        raise SubmitError(f"{outside}compute and {where}{BLOCK}.pools both name the compute. Leave one of them out.")
    resources = _resources(rest.get("resources"), given, pools)
    if pools is not None:
        given["compute"] = pools
    loaded = load()
    try:
        if isinstance(given.get("distribution"), ElasticDistribution):
            given["distribution"] = _distribution(rest, loaded, resources, given["distribution"], where)
        job: ElasticCommandJob = ElasticCommandJob.from_command(loaded, resources=resources, **given, **changes)
    except ValidationError as error:
        raise SubmitError(_wrong(error, where)) from None
    return job


def load_plain(document: Mapping[str, Any], file: Path, where: str = "") -> Any:
    """Load a job without its block by azure-ai-ml.

    Args:
        where: path of the document in the file, for errors.
    """
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml import load_job
        from azure.ai.ml.exceptions import ValidationException
        from marshmallow.exceptions import ValidationError as SchemaError
    # azure-ai-ml reads files and streams alone; relative_origin is what the paths in a stream are relative to.
    try:
        return load_job(
            io.StringIO(yaml.safe_dump(dict(document), sort_keys=False)), relative_origin=str(file.absolute())
        )
    except (ValidationException, SchemaError) as error:
        of_nodes = document["trial"] if document.get("type") == SWEEP else document
        raise SubmitError(readable(error, of_nodes, where)) from None


def _resources(standard: Any, given: dict[str, Any], pools: Any) -> dict[str, Any] | None:
    """Remove the node counts from the block's fields and return them; ``None`` if only the standard fields apply."""
    counts = {name: value for name in COUNTS if (value := given.pop(name, None)) is not None}
    if "max_instance_count" in counts:
        return counts
    if pools:
        return {**given_fields(resources_of_pools(pools)), **counts}
    fields = standard if isinstance(standard, dict) else {}
    most = fields.get("max_instance_count") or fields.get("instance_count") or 1
    if not isinstance(most, int) or most <= 1:
        raise SubmitError(f"nothing says how many nodes may train at once. Give max_instance_count:{_SHORTEST}")
    return {**counts, "max_instance_count": most} if counts else None


def _distribution(
    document: Mapping[str, Any], loaded: Any, resources: Any, block: ElasticDistribution, where: str
) -> ElasticDistribution:
    """Return the block's distribution, completed from the standard distribution and a launcher in the command."""
    from azureml_elastic.submit import ElasticCommandJob

    standard = document.get("distribution")
    kind = str(standard.get("type", "")).lower() if isinstance(standard, dict) else ""
    if not block.model_fields_set.isdisjoint({"framework", "process_count_per_instance"}):
        return block
    if kind not in {"", "pytorch", "ray"}:
        framework = "horovod" if kind == "mpi" else "pytorch"
        raise SubmitError(
            f"{where}distribution.type is {kind!r}, but an elastic job runs PyTorch, Horovod, Dask or Ray. If the "
            f"script runs so, leave it out, or give {where}{BLOCK}.distribution.framework, as in 'framework: "
            f"{framework}'."
        )
    outside = ElasticCommandJob.from_command(loaded, resources=resources).distribution
    return ElasticDistribution.model_validate(given_fields(outside) | given_fields(block))


def _check_variables(variables: Any, where: str) -> None:
    """Reject values that azure-ai-ml would convert to text such as ``None`` or ``{'a': 1}``."""
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if value is None or isinstance(value, dict | list):
            raise SubmitError(
                f"{where}environment_variables.{name} is {'empty' if value is None else 'a block'}; give a text, "
                'in quotes, which may be "".'
            )


def _check_literals(inputs: Any, where: str) -> None:
    for name, value in inputs.items() if isinstance(inputs, dict) else ():
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in _LITERALS:
            raise SubmitError(
                f"{where}inputs.{name}.type is {kind!r}, which only a component's input may have. Give the value "
                f"itself, as in '{name}: {json.dumps(_LITERALS[kind])}'."
            )


def _check_misplaced(document: Mapping[str, Any], where: str) -> None:
    resources = document.get("resources")
    for name in COUNTS:
        if isinstance(resources, dict) and name in resources and name != "max_instance_count":
            raise SubmitError(f"{where}resources.{name} belongs in the {BLOCK}: block, as {BLOCK}.{name}.")
    for name in sorted(block_model().model_fields.keys() & document.keys() - {"distribution"}):
        raise SubmitError(f"{where}{name} belongs in the {BLOCK}: block, as {BLOCK}.{name}.")


def _wrong(error: ValidationError, where: str) -> str:
    """Return the faults of the job as a whole, by their paths in the file, without values."""
    faults = []
    for detail in error.errors(include_url=False, include_input=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        ours = error.title != "ElasticCommandJob" or not name
        path = f"{BLOCK}.{name}".rstrip(".") if ours else ELSEWHERE.get(name, name)
        faults.append(f"{where}{path}: {wanted([detail])}.")
    return " ".join(dict.fromkeys(faults))
