"""Compilation of a job file to a standard YAML file, which azure-ai-ml and the az command line can submit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit.runtime.staging import RUNTIME_FILE, copy_runtime, replace_file
from azureml_elastic.submit.yaml.entity_document import PathFormat, real_path
from azureml_elastic.submit.yaml.job_file import PIPELINE, load_elastic_job, loaded_file, read_document
from azureml_elastic.submit.yaml.pipeline_file import ElasticPipeline, read_pipeline
from azureml_elastic.submit.yaml.standard_yaml import pipeline_yaml, standard_yaml
from azureml_elastic.submit.yaml.yaml_terms import translated_errors

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

_MARK = "# Compiled by azureml-elastic"
_PATHS = frozenset({"path", "code", "component", "trial", "environment", "conda_file"})
"""Fields of a pipeline's steps that may have paths relative to its file."""

_TEXTS = frozenset({"command", "description", "inputs", "outputs", "environment_variables", "tags", "properties"})
"""Fields that have texts, or whose entries are texts."""


@dataclass(frozen=True)
class Compiled:
    """A compiled job file.

    Args:
        runtime: file with the library's copy beside the target; ``None`` if none is needed.
        runtime_changed: whether the copy had to be written.
    """

    text: str
    runtime: Path | None = None
    runtime_changed: bool = False


def compile_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()
) -> Compiled:
    """Compile a job file to standard YAML, and write it to a file if one is given.

    Paths relative to the job file are rewritten relative to the target. With ``delivery="ship"`` a copy of the library
    is written beside the target, so that both can be committed together.

    Args:
        target: path of the file to write. ``None`` writes no file and makes all paths absolute.
        overrides: values to set in the job first, each as ``a.b=c``.

    Raises:
        SubmitError: the job cannot be read or compiled, or the target was not written by this function.
        CommandError: the command starts no Python program, or one that is not in ``code``.
        MissingExtra: azure-ai-ml is not installed.
    """
    wanted = tuple(overrides)
    origin = Path(source)
    document = read_document(origin, wanted)
    made: ElasticPipeline | ElasticCommandJob
    if document.get("type") == PIPELINE:
        made = loaded_file(origin, wanted, read_pipeline)
        ships = made.ships
    else:
        made = load_elastic_job(origin, wanted)
        ships = made.delivery == "ship"
    if target is None:
        return Compiled(_text(made, origin, PathFormat()))
    path = Path(target)
    _check_target(path, origin)
    folder = path.absolute().parent
    kept = {real_path(one, named=named) for one in _absolute_paths(document) for named in (True, False)}
    _write(folder)  # azure-ai-ml reads the files of components from there
    text = _text(made, origin, PathFormat(folder, frozenset(kept)), folder / RUNTIME_FILE)
    text = f"{_MARK} from {origin.name}: change that file, and compile it again.\n{text}"
    runtime, changed = copy_runtime(folder) if ships else (None, False)
    _write(path, text)
    return Compiled(text, runtime, changed)


def _text(
    made: ElasticPipeline | ElasticCommandJob, source: Path, paths: PathFormat, runtime: Path | None = None
) -> str:
    try:
        with translated_errors():
            if isinstance(made, ElasticPipeline):
                moved = _moved(made.document, replace(paths, base=source.absolute().parent), "")
                return pipeline_yaml(made, moved, paths, runtime)
            return standard_yaml(made, paths, runtime)
    except (SubmitError, CommandError) as error:
        raise type(error)(f"{source}: {error}") from error


def _moved(value: Any, paths: PathFormat, place: str) -> Any:
    """Return a part of a pipeline's document with its paths, which are relative to its file, in another format."""
    if isinstance(value, Mapping):
        return {name: _moved(one, paths, f"{place}.{name}".lstrip(".")) for name, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, paths, f"{place}.{number}") for number, one in enumerate(value)]
    if not isinstance(value, str) or os.path.realpath(paths.folder or "") == os.path.realpath(paths.base):
        return value
    scheme, bare = ("file:", value[5:]) if value.startswith("file:") else ("", value)
    holder, key = ["", *place.split(".")][-2:]
    if key in _TEXTS or holder in _TEXTS or not _is_local(bare, paths.base):
        return value
    if key not in _PATHS:
        if not re.search(r"[./]", bare):
            return value
        raise SubmitError(
            f"{place} is {value!r}, which may be a path relative to {paths.base}. Compile to a file in that folder."
        )
    return f"{scheme}{paths.format(bare)}"


def _is_local(text: str, base: Path) -> bool:
    try:
        return bool(text.strip()) and not Path(text).is_absolute() and (base / text).exists()
    except (OSError, ValueError):  # too long for a path, or with a character that none has
        return False


def _check_target(target: Path, source: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise SubmitError(f"{target} is the job file itself. Give another name to write to, such as compiled.yml.")
    try:
        unrelated = target.exists() and not target.read_text(encoding="utf-8").startswith(_MARK)
    except (OSError, UnicodeDecodeError):
        unrelated = True
    if unrelated:
        raise SubmitError(f"{target} exists and was not compiled by azureml-elastic. Give another name.")


def _absolute_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _absolute_paths(one)
    elif isinstance(value, str) and Path(value).is_absolute():
        yield value


def _write(target: Path, text: str | None = None) -> None:
    """Write a file, or without a text make a folder."""
    try:
        if text is None:
            target.mkdir(parents=True, exist_ok=True)
        else:
            replace_file(target, text.encode())
    except OSError as error:
        raise SubmitError(
            f"{target} cannot be written ({error.strerror}). Give a file in a writable folder."
        ) from error
