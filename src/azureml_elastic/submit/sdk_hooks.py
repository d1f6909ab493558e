"""Why the unmodified ``MLClient`` takes our job: the two names of azure-ai-ml that are not public.

``create_or_update`` accepts any ``BaseNode`` and, for those that are neither ``Command`` nor ``Spark``, submits
what ``_to_job()`` returns. ``BaseNode`` is an abstract base class, so a class that inherits nothing from it can
be *registered* with it. The same ``_to_job()``, asked of azure-ai-ml's own ``Command``, reads an existing job.
Nothing else in this library leans on what azure-ai-ml keeps to itself; where a release changed it,
``ml_client.jobs.create_or_update(job.compile())`` still works, by public names only.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import MissingExtra, SubmitError

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, CommandJob, PipelineJob

__all__ = ["Submittable", "fields_of_command", "plain_command_job", "register"]


class Submittable(ABC):
    """What ``MLClient`` submits by compiling it first."""

    @abstractmethod
    def compile(self) -> Command | PipelineJob:
        """Return a new entity of azure-ai-ml."""

    def _to_job(self) -> Command | PipelineJob:
        """Answer the question that ``create_or_update`` asks first."""
        return self.compile()


def register(model: type[Submittable]) -> None:
    """Make ``isinstance(job, BaseNode)`` true for the model's instances; a second time changes nothing.

    Args:
        model: the class whose instances ``MLClient`` is to take.

    Raises:
        MissingExtra: azure-ai-ml is not installed.
    """
    try:
        from azure.ai.ml.entities._builders import BaseNode
    except ModuleNotFoundError as error:
        raise MissingExtra("azure-ai-ml", "submit") from error
    BaseNode.register(model)


def plain_command_job(job: Any) -> CommandJob:
    """Return a command job of azure-ai-ml with plain values; the given one is not changed.

    ``command()`` returns a ``Command``, a node of a pipeline whose inputs know their owner; a ``CommandJob`` holds
    the values themselves. The second of the two names turns the first into the second.

    Args:
        job: a ``Command`` or a ``CommandJob``.

    Raises:
        SubmitError: it is something else, a run, or a call of a registered component, whose command is not at hand.
        MissingExtra: azure-ai-ml is not installed.
    """
    try:
        from azure.ai.ml.entities import Command, CommandComponent, CommandJob
    except ModuleNotFoundError as error:
        raise MissingExtra("azure-ai-ml", "submit") from error
    if not isinstance(job, (Command, CommandJob)):
        raise SubmitError(
            f"from_command() got a {type(job).__name__}. Give a command job: what command(...) returns, or "
            "load_job('job.yml') of a file with 'type: command'."
        )
    if job.id is not None:
        raise SubmitError(
            f"The command job {job.name!r} was submitted already: it holds what the service has made of it. Give the "
            "job that was submitted: what command(...) returned, or load_job('job.yml')."
        )
    if isinstance(job, CommandJob):
        return job
    if not isinstance(job.component, CommandComponent):
        raise SubmitError(
            f"The command job calls the registered component {job.component!r}, whose command is not at hand. Load it "
            "with ml_client.components.get(...) and call that, or give command() the command itself."
        )
    return job._to_job()  # noqa: SLF001 - the public entity knows its values by its owner only


def fields_of_command() -> frozenset[str]:
    """Return the names of the fields that the installed azure-ai-ml's ``command()`` takes.

    Raises:
        MissingExtra: azure-ai-ml is not installed.
    """
    try:
        from azure.ai.ml import command
    except ModuleNotFoundError as error:
        raise MissingExtra("azure-ai-ml", "submit") from error
    fields = inspect.signature(command).parameters.values()
    return frozenset(field.name for field in fields if field.kind is field.KEYWORD_ONLY)
