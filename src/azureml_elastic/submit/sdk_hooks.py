"""The private names of azure-ai-ml that this library uses: to submit and to validate elastic jobs.

``create_or_update`` accepts any ``BaseNode`` and, unless it is a ``Command`` or ``Spark``, submits the result of its
``_to_job()``. ``BaseNode`` is an abstract base class, so an unrelated class can be *registered* with it. The
``_to_job()`` of azure-ai-ml's own ``Command`` reads an existing job. The rest of this library uses public names only;
should a release of azure-ai-ml change these two, ``ml_client.jobs.create_or_update(job.compile())`` still works.

``jobs.validate`` checks only classes that inherit from a private one, and reports success for all others. The method is
therefore wrapped: an elastic job is compiled, and the result is validated.

Whatever creates a node while a ``@dsl.pipeline`` function runs adds it to that pipeline, also where the node is only
looked at. The stack of the pipelines being built is therefore hidden while an elastic job is compiled or converted.

A client shows the progress of all its uploads or of none. The function that uploads local inputs is therefore wrapped:
it is quiet for the library that is sent with a job. Without these wrapped functions, jobs are submitted all the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from azureml_elastic.errors import CommandError, SubmitError, needs_extra

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, CommandComponent, CommandJob, PipelineJob, ValidationResult

_MARK = "_wrapped_for_elastic_jobs"
_UPLOAD = "_upload_and_generate_remote_uri"
_BLANK = re.compile(r"(?:\x1b\[\d*m)?\n")

__all__ = [
    "Ignored",
    "Submittable",
    "component_of",
    "fields_of_command",
    "outside_pipelines",
    "plain_command_job",
    "quiet_uploads",
    "register",
]


class Submittable(ABC):
    """Base class of jobs that ``MLClient`` compiles before it submits them."""

    @abstractmethod
    def compile(self) -> Command | PipelineJob:
        """Return the job as a new entity of azure-ai-ml."""

    def _to_job(self) -> Command | PipelineJob:
        """Return the entity that ``create_or_update`` submits."""
        return self.compile()

    def _set_base_path(self, _: object) -> None:
        """Refuse to be a node as it is: ``PipelineJob(jobs=...)`` calls this of each."""
        raise SubmitError(
            "jobs= of a PipelineJob has an elastic job, which is no node of a pipeline. Give what it compiles to, a "
            "node with the placement 'gang' or 'service': job.with_options(resources={'placement': 'gang'}).compile()."
        )


@contextlib.contextmanager
def outside_pipelines() -> Iterator[None]:
    """Keep nodes that are created meanwhile out of the pipeline whose function is running."""
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.dsl import _pipeline_component_builder as builder
    stack = getattr(builder, "_definition_builder_stack", None)
    if stack is None:
        yield
        return
    held, stack.items = stack.items, []
    try:
        yield
    finally:
        stack.items = held


def register(model: type[Submittable], quiet: str) -> None:
    """Register a class with ``BaseNode``, so that ``MLClient`` accepts and validates its instances; idempotent.

    Args:
        model: class of elastic jobs.
        quiet: name of the file whose upload shows no progress.
    """
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.entities._builders import BaseNode
        from azure.ai.ml.operations import JobOperations, _job_operations
    BaseNode.register(model)
    if not hasattr(JobOperations.validate, _MARK):
        JobOperations.validate = _compiling(JobOperations.validate)  # type: ignore[method-assign]
    upload = getattr(_job_operations, _UPLOAD, None)
    if upload is not None and not hasattr(upload, _MARK):
        setattr(_job_operations, _UPLOAD, _quiet(upload, quiet))


def _compiling(validate: Callable[..., ValidationResult]) -> Callable[..., ValidationResult]:
    """Return ``JobOperations.validate`` that compiles an elastic job first; other jobs are passed on as they are."""

    @functools.wraps(validate)
    def wrapper(self: Any, job: Any, *, raise_on_failure: bool = False, **options: Any) -> ValidationResult:
        if isinstance(job, Submittable):
            try:
                job = job.compile()
            except (SubmitError, CommandError) as error:
                if raise_on_failure:
                    raise
                return _failed(str(error))
            with outside_pipelines():
                return validate(self, job, raise_on_failure=raise_on_failure, **options)
        return validate(self, job, raise_on_failure=raise_on_failure, **options)

    setattr(wrapper, _MARK, True)
    return wrapper


def _quiet(upload: Callable[..., str], name: str) -> Callable[..., str]:
    """Return the function that uploads a local path, without progress for a file of this name."""

    @functools.wraps(upload)
    def wrapper(*arguments: Any, **options: Any) -> str:
        # The path is the third argument.
        if not any(Path(str(each)).name == name for each in (*arguments[2:3], options.get("path"))):
            return upload(*arguments, **options)
        with contextlib.redirect_stderr(_WithoutBlankLines(sys.stderr)):
            return upload(*arguments, **{**options, "show_progress": False})

    setattr(wrapper, _MARK, True)
    return wrapper


class Ignored:
    """The files of a folder that its ``.amlignore``, or ``.gitignore``, keeps from being uploaded.

    Args:
        folder: folder of a job's code or input.
    """

    def __init__(self, folder: str | Path) -> None:
        from azure.ai.ml._utils._asset_utils import get_ignore_file

        self._file = get_ignore_file(folder)
        self._base = Path(folder).resolve()

    def has(self, relative: str) -> bool:
        """Return whether a file is ignored."""
        return bool(self._file.is_file_excluded(self._base / relative))


@contextlib.contextmanager
def quiet_uploads() -> Iterator[None]:
    """Keep the blank lines and the bare escape codes, with which azure-ai-ml ends an upload, from files and pipes."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(_WithoutBlankLines(sys.stderr)):
        yield


class _WithoutBlankLines(io.TextIOBase):
    """Text stream without the blank lines with which azure-ai-ml ends an upload; other threads may write to it, too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not _BLANK.fullmatch(text):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _failed(message: str) -> ValidationResult:
    from azure.ai.ml.entities._validation import ValidationResultBuilder

    return ValidationResultBuilder.from_single_message(message)


def plain_command_job(job: Any) -> CommandJob:
    """Return a command job of azure-ai-ml with plain values, without modifying the given one.

    ``command()`` returns a ``Command``, a pipeline node with bound inputs; a ``CommandJob`` has plain values.

    Raises:
        SubmitError: the argument is something else, a submitted job, or a call of a registered component, whose
            command is not available.
        MissingExtra: azure-ai-ml is not installed.
    """
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.entities import Command, CommandComponent, CommandJob
    if not isinstance(job, (Command, CommandJob)):
        raise SubmitError(
            f"from_command() got a {type(job).__name__}. Give a command job: what command(...) returns, or "
            "load_job('job.yml') of a file with 'type: command'."
        )
    if job.id is not None:
        raise SubmitError(
            f"The command job {job.name!r} was submitted already and has been rewritten by the service. Give the "
            "original job: what command(...) returned, or load_job('job.yml')."
        )
    if isinstance(job, CommandJob):
        return job
    if not isinstance(job.component, CommandComponent):
        raise SubmitError(
            f"The command job calls the registered component {job.component!r}, whose command is unknown. Load it "
            "with ml_client.components.get(...) and call that, or give command() the command itself."
        )
    with outside_pipelines():
        return job._to_job()  # noqa: SLF001 - no public conversion exists


def component_of(job: Any) -> CommandComponent | None:
    """Return the component that a node of azure-ai-ml calls, as :func:`plain_command_job` accepts it, or ``None``."""
    from azure.ai.ml.entities import Command, CommandComponent

    component = job.component if isinstance(job, Command) else None
    return component if isinstance(component, CommandComponent) else None


def fields_of_command() -> frozenset[str]:
    """Return the names of the parameters of ``command()`` in the installed azure-ai-ml."""
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml import command
    fields = inspect.signature(command).parameters.values()
    return frozenset(field.name for field in fields if field.kind is field.KEYWORD_ONLY)
