"""How a node learns that it is about to be taken away, and what it does then."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from azureml_elastic.config.base import ConfigModel, Duration, PositiveDuration

__all__ = ["METADATA_ADDRESS", "PreemptionPolicy"]

METADATA_ADDRESS = "http://169.254.169.254/metadata"
"""Azure's Instance Metadata Service, as every virtual machine in a virtual network reaches it."""


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
    """The notices of a preemption. SIGTERM and SIGINT to a node's agent always are one.

    Args:
        grace: the longest time that workers have, after the notice, to reach a step boundary and save.
        scheduled_events: address of the metadata service that announces Azure's scheduled events, up to and without
            ``/scheduledevents``; ``None`` asks for none.
        lead: how long before its earliest start an event other than ``Preempt`` makes the node leave: such events may
            be announced days ahead.
        marker: path of a file that, while it exists, is a notice; ``{node}`` stands for the node's name. ``None``
            looks for none.
        poll_interval: between two looks at the service and at the file.
        acknowledge: whether a node that has left tells Azure that its event may start at once.
    """

    grace: Duration = timedelta(seconds=25)
    scheduled_events: Annotated[str, AfterValidator(_metadata_address)] | None = METADATA_ADDRESS
    lead: Duration = timedelta(minutes=2)
    marker: str | None = Field(default=None, min_length=1)
    poll_interval: PositiveDuration = timedelta(seconds=1)
    acknowledge: bool = False
