"""The sources of preemption notices, and the response to them."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from azureml_elastic.config.base import ConfigModel, Duration

__all__ = ["METADATA_ADDRESS", "PreemptionPolicy"]

METADATA_ADDRESS = "http://169.254.169.254/metadata"
"""Azure's Instance Metadata Service, at the link-local address that every virtual machine reaches it by."""


def _metadata_address(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"scheduled_events={value!r} is no address ({error}); give {METADATA_ADDRESS}") from error
    wrong = parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or port == 0
    if wrong or any(character.isspace() for character in value):
        raise ValueError(
            f"scheduled_events={value!r} is not of the form http://host[:port]/path; give {METADATA_ADDRESS}, or null "
            "where there is no metadata service"
        )
    return value.rstrip("/")


class PreemptionPolicy(ConfigModel):
    """The sources of preemption notices and the response to them.

    SIGTERM or SIGINT to a node's agent always counts as a notice.

    Args:
        grace: maximum time between the notice and the workers' exit, within which they reach a step boundary and save
            a checkpoint.
        scheduled_events: base address of the metadata service that announces Azure's scheduled events, without the
            ``/scheduledevents`` suffix. ``None`` disables polling.
        lead: time before an event's earliest start at which the node leaves, for event types other than ``Preempt``,
            which may be announced days ahead.
        marker: path of a file whose existence is a notice; ``{node}`` is replaced by the node's identifier. ``None``
            disables the file.
        acknowledge: whether a node that has left approves the event, so that Azure may start it at once.
    """

    grace: Duration = timedelta(seconds=25)
    scheduled_events: Annotated[str, AfterValidator(_metadata_address)] | None = METADATA_ADDRESS
    lead: Duration = timedelta(minutes=2)
    marker: str | None = Field(default=None, min_length=1)
    acknowledge: bool = False
