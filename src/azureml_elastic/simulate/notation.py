"""Notation of what is simulated: durations, hazards, work, durations of a step, and intervals of checkpoints."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from datetime import timedelta

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.config.base import parse_duration
from azureml_elastic.errors import UsageError
from azureml_elastic.simulate.hazard import Hazard

__all__ = ["parse_checkpoint", "parse_hazard", "parse_nodes", "parse_seconds", "parse_step_seconds", "parse_work"]


def parse_seconds(text: str, what: str) -> float:
    """Return the seconds of a duration such as ``90``, ``90s``, ``1.5m``, ``6h`` or ``7d``.

    Raises:
        UsageError: the text is no duration.
    """
    duration = parse_duration(text)
    if duration is None:
        raise UsageError(f"{what}={text!r} is no duration; give a number with ms, s, m, h or d, as in 90s or 6h.")
    return duration.total_seconds()


def parse_hazard(text: str) -> Hazard:
    """Return the hazard of a text such as ``loss_every=6h,reclaim_every=1d,reclaim_share=0.5``.

    Raises:
        UsageError: a name is unknown, or a value is no duration or share.
    """
    names = [each.name for each in fields(Hazard)]
    values: dict[str, float] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not separator or name not in names:
            raise UsageError(
                f"The hazard has {entry!r}; give NAME=VALUE with one of {', '.join(names)}, as in "
                "loss_every=6h,reclaim_every=1d,reclaim_share=0.5."
            )
        values[name] = _share(value) if name == "reclaim_share" else parse_seconds(value, name)
    if not values.keys() & {"loss_every", "reclaim_every"}:
        raise UsageError(
            f"The hazard {text!r} has no losses; give loss_every, reclaim_every or both, as in loss_every=6h."
        )
    return Hazard(**values)


def parse_nodes(text: str) -> tuple[int, int]:
    """Return minimum and maximum of a text such as ``1:16``, or twice the number of ``16``.

    Raises:
        UsageError: the text is no range of numbers of nodes.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip())
    if match is None:
        raise UsageError(f"--nodes={text!r} is no range; give minimum and maximum, as in 1:16.")
    return int(match[1]), int(match[2] or match[1])


def parse_step_seconds(text: str) -> dict[int, float]:
    """Return the seconds of a step by number of nodes of a text such as ``1=2s,4=0.6s``, or ``2s`` for one node.

    Raises:
        UsageError: an entry is not of this form.
    """
    found: dict[int, float] = {}
    for entry in text.split(","):
        nodes, separator, value = entry.rpartition("=")
        if separator and not nodes.strip().isdecimal():
            raise UsageError(f"--step-seconds has {entry!r}; give NODES=SECONDS, as in 1=2s,4=0.6s.")
        found[int(nodes) if separator else 1] = parse_seconds(value, "--step-seconds")
    return found


def parse_work(text: str, seconds_per_step: float) -> int:
    """Return the number of steps of a text such as ``20000``, or ``500nh`` for the steps of 500 hours of one node.

    Args:
        text: number of steps, or of node-hours.
        seconds_per_step: duration of a step on one node.

    Raises:
        UsageError: the text is neither.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*nh", text.strip()):
        return max(1, math.ceil(float(match[1]) * 3600 / seconds_per_step))
    if not re.fullmatch(r"[1-9]\d{0,14}", text.strip()):
        raise UsageError(f"--work={text!r} is no amount of work; give steps, as in 20000, or node-hours, as in 500nh.")
    return int(text)


def parse_checkpoint(text: str) -> CheckpointPolicy:
    """Return the policy of a text such as ``auto``, ``5m`` or ``100steps``.

    Raises:
        UsageError: the text is none of them, or the interval is 0.
    """
    if text == "auto":
        return CheckpointPolicy(every="auto")
    if match := re.fullmatch(r"([1-9]\d{0,14})\s*steps?", text.strip()):
        return CheckpointPolicy(every=None, every_steps=int(match[1]))
    seconds = parse_seconds(text, "--checkpoint-every")
    if seconds == 0:
        raise UsageError("--checkpoint-every=0 is not above 0; give auto, a duration such as 5m, or 100steps.")
    return CheckpointPolicy(every=timedelta(seconds=seconds))


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"reclaim_share={text!r} is no number; give one from 0 to 1.") from error
