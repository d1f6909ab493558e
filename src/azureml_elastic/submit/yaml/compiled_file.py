"""Compilation of a job file to a standard YAML file, which azure-ai-ml and the az command line can submit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit.runtime.staging import RUNTIME_FILE, copy_runtime, replace_file
from azureml_elastic.submit.yaml.job_file import load_elastic_job, read_document
from azureml_elastic.submit.yaml.standard_yaml import standard_yaml

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = ["Compiled", "compile_file"]

_MARK = "# Compiled by azureml-elastic"


@dataclass(frozen=True)
class Compiled:
    """A compiled job file.

    Args:
        text: standard YAML of the job.
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
    job = load_elastic_job(origin, wanted)
    if target is None:
        return Compiled(_text(job, origin))
    path = Path(target)
    _check_target(path, origin)
    folder = path.absolute().parent
    beside = folder / RUNTIME_FILE
    absolute = frozenset(_absolute_paths(read_document(origin, wanted)))
    text = _text(job, origin, folder=folder, absolute=absolute, runtime=beside)
    text = f"{_MARK} from {origin.name}: change that file, and compile it again.\n{text}"
    runtime, changed = copy_runtime(folder) if job.delivery == "ship" else (None, False)
    _write(path, text)
    return Compiled(text, runtime, changed)


def _text(job: ElasticCommandJob, source: Path, **paths: Any) -> str:
    try:
        return standard_yaml(job, **paths)
    except (SubmitError, CommandError) as error:
        raise type(error)(f"{source}: {error}") from error


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
    """Yield the absolute paths in a document."""
    if isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _absolute_paths(one)
    elif isinstance(value, str) and Path(value).is_absolute():
        yield value


def _write(target: Path, text: str) -> None:
    try:
        replace_file(target, text.encode())
    except OSError as error:
        raise SubmitError(
            f"{target} cannot be written ({error.strerror}). Give a file in a writable folder."
        ) from error
