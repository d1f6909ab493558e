"""A job file compiled to another file that needs nothing but azure-ai-ml or the az command line to be submitted."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit.runtime.staging import copy_runtime
from azureml_elastic.submit.yaml.job_file import load_elastic_job, read_document
from azureml_elastic.submit.yaml.standard_yaml import standard_yaml

if TYPE_CHECKING:
    from azureml_elastic.submit.job import ElasticCommandJob

__all__ = ["Compiled", "compile_file"]

_MARK = "# Compiled by azureml-elastic"


@dataclass(frozen=True)
class Compiled:
    """What has come of a job file.

    Args:
        text: the standard YAML.
        runtime: the library's copy beside the file; ``None`` where none is needed.
        runtime_changed: whether the copy had to be written.
    """

    text: str
    runtime: Path | None = None
    runtime_changed: bool = False


def compile_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()
) -> Compiled:
    """Return a job file's job as standard YAML, and write it.

    Paths that the job file has relative to its own folder are relative to the target's. With ``delivery="ship"`` the
    library lies beside the target, so that both can be committed together.

    Args:
        source: the job file.
        target: the file to write; ``None`` writes none, and all paths are absolute.
        overrides: values to set in the job first, each ``a.b=c``.

    Raises:
        SubmitError: the job cannot be read or compiled, or the target is another's file.
        CommandError: the command starts no Python program, or one that is not in ``code``.
        MissingExtra: azure-ai-ml is not installed.
    """
    wanted = tuple(overrides)
    origin = Path(source)
    job = load_elastic_job(origin, wanted)
    if target is None:
        return Compiled(_text(job, origin))
    place = Path(target)
    _check_target(place, origin)
    folder = place.absolute().parent
    beside = folder / "azureml_elastic_runtime"
    absolute = frozenset(_absolute_paths(read_document(origin, wanted)))
    text = _text(job, origin, folder=folder, absolute=absolute, runtime=beside)
    text = f"{_MARK} from {origin.name}: change that file, and compile it again.\n{text}"
    runtime, changed = copy_runtime(folder) if job.delivery == "ship" else (None, False)
    _write(place, text)
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
        theirs = target.exists() and not target.read_text(encoding="utf-8").startswith(_MARK)
    except (OSError, UnicodeDecodeError):
        theirs = True
    if theirs:
        raise SubmitError(f"{target} is there already and was not compiled by azureml-elastic. Give another name.")


def _absolute_paths(value: Any) -> Iterator[str]:
    """Yield every absolute path in a document."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _absolute_paths(one)
    elif isinstance(value, list):
        for one in value:
            yield from _absolute_paths(one)
    elif isinstance(value, str) and Path(value).is_absolute():
        yield value


def _write(target: Path, text: str) -> None:
    """Replace the file at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SubmitError(
            f"{target} cannot be written ({error.strerror}). Give a file in a folder of yours."
        ) from error
