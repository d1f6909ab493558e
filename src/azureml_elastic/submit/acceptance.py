"""Why the unmodified ``MLClient`` takes our job: the two names of azure-ai-ml that are not public.

``create_or_update`` accepts any ``BaseNode`` and, for those that are neither ``Command`` nor ``Spark``, submits
what ``_to_job()`` returns. ``BaseNode`` is an abstract base class, so a class that inherits nothing from it can
be *registered* with it. Nothing else in this library leans on what azure-ai-ml keeps to itself; where a release
changed it, ``ml_client.jobs.create_or_update(job.compile())`` still works, by public names only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from azureml_elastic.errors import MissingExtra

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, PipelineJob

__all__ = ["Submittable", "register"]


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
