"""Parameters of the simulation from the events of runs. Pure functions.

Durations are medians over the nodes and rounds of all runs; those of steps and of pauses for checkpoints are means.
Each is the difference of two times of one node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.accounting import Cause, account
from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    Event,
    NodeReady,
    NodeStarted,
    Progress,
    RoundEntered,
    RoundReopened,
    RunEnded,
)
from azureml_elastic.ledger.picture import Picture, Records
from azureml_elastic.simulate.scenario import Parameters

_TRAINS = ("training", "saving", "lost work")

_STALL = 10.0
"""Duration of a step, as a multiple of the median, from which a node has stalled: no property of the program."""

_Place = tuple[str, int]
"""A node and a round."""


@dataclass
class _Samples:
    """Measured durations in seconds."""

    start: list[float] = field(default_factory=list)
    joining_start: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    recovery: dict[Cause, list[float]] = field(default_factory=dict)
    steps: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    paused: dict[int, float] = field(default_factory=dict)
    pause: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)


def calibrate(runs: Iterable[Sequence[Event]], base: Parameters | None = None) -> Parameters:
    """Return the parameters that the events of runs show.

    Args:
        base: values of what no run shows, such as the provisioning of machines; the defaults without it.

    Raises:
        UsageError: no run has trained two steps in a round.
    """
    samples = _Samples()
    for events in runs:
        _measure(events, samples)
    if not samples.steps:
        raise UsageError(
            "The events show no round with two reported steps, so the duration of a step is unknown. Calibrate with a "
            "run whose script uses train.start(), or give --step-seconds."
        )
    base = base or Parameters()
    start = _median(samples.start, base.start_seconds)
    joining = _median(samples.joining_start, start + base.preload_seconds)
    return base.model_copy(
        update={
            "step_seconds": {
                nodes: _per_step(found, samples.paused[nodes]) for nodes, found in sorted(samples.steps.items())
            },
            "start_seconds": start,
            "preload_seconds": max(0.0, joining - start),
            "first_step_seconds": _median(samples.first_step, base.first_step_seconds),
            "recovery_seconds": _recoveries(samples.recovery, base),
            "checkpoint_pause_seconds": (fmean(samples.pause) if samples.pause else base.checkpoint_pause_seconds),
            "checkpoint_write_seconds": _median(samples.write, base.checkpoint_write_seconds),
            "finish_seconds": _median(samples.finish, base.finish_seconds),
        }
    )


def _measure(events: Iterable[Event], samples: _Samples) -> None:
    picture = Picture.of(events)
    spans = account(picture)
    first_steps: dict[_Place, float] = {}
    pauses: dict[_Place, float] = {}
    causes: dict[_Place, Cause] = {}
    for span in spans:
        place = span.node, span.round
        if span.activity in _TRAINS:
            first_steps[place] = min(span.started, first_steps.get(place, span.started))
        if span.activity == "saving":
            pauses[place] = pauses.get(place, 0.0) + span.seconds
        if span.cause is not None:  # of the two in a round, the one at its end is the later one
            causes[place] = span.cause
    first = min((round_.number for round_ in picture.sealed), default=0)
    _measure_starts(picture, first_steps, first, samples)
    for round_ in picture.rounds.values():
        for node, own in round_.parts.items():
            _measure_part(own, first_steps.get((node, round_.number + 1)), causes.get((node, round_.number)), samples)
            entry, steps = own.last(RoundEntered), _steps_of(own)
            if entry is not None and entry.rank == 0 and len(steps) > 1:
                # On rank 0's node, by number of nodes; without the pauses for checkpoints.
                measured = samples.steps.setdefault(len(entry.members), [])
                measured += [(after.time - each.time, after.step - each.step) for each, after in pairwise(steps)]
                paused = samples.paused.get(len(entry.members), 0.0)
                samples.paused[len(entry.members)] = paused + pauses.get((node, round_.number), 0.0)


def _measure_starts(picture: Picture, first_steps: Mapping[_Place, float], first: int, samples: _Samples) -> None:
    """Measure the time until a node is ready, apart for nodes that are not in the first round, and its wait."""
    waits = []
    for name, node in picture.nodes.items():
        started, ready = node.first(NodeStarted), node.last(NodeReady)
        if ready is None:
            continue
        if started is not None:
            began = started.time if started.began is None else started.began
            early = first in node.parts and node.parts[first].has(RoundEntered)
            (samples.start if early else samples.joining_start).append(ready.time - began)
        if (name, first) in first_steps:
            waits.append(first_steps[name, first] - ready.time)
    # The node that was ready last has waited for the shortest time.
    samples.first_step += [min(waits)] if waits else []


def _measure_part(own: Records, resumed: float | None, cause: Cause | None, samples: _Samples) -> None:
    """Measure what one node has recorded of a round: its checkpoints, and what follows its last step.

    A recovery lasts from the end of a round, as its reporter knows it, to its first step in the next one. At a step
    boundary the round ends with its last step; otherwise it ends when the loss is noticed.
    """
    steps = _steps_of(own)
    for commit in own.all(CheckpointCommitted):
        samples.pause.append(commit.seconds)
        written = [commit.time - each.time - commit.seconds for each in steps if each.step == commit.step]
        samples.write += [max(0.0, seconds) for seconds in written]
    samples.finish += [end.time - steps[-1].time for end in own.all(RunEnded) if end.succeeded and steps]
    for event in own.all(RoundReopened):
        if resumed is not None and cause is not None:
            at_boundary = steps and event.reason == "rescale at a step boundary"
            samples.recovery.setdefault(cause, []).append(resumed - (steps[-1] if at_boundary else event).time)


def _steps_of(own: Records) -> list[Progress]:
    """Return the reported steps, each once: the last one may be reported twice."""
    steps: list[Progress] = []
    for event in own.all(Progress):
        if not steps or event.step > steps[-1].step:
            steps.append(event)
    return steps


def _recoveries(found: dict[Cause, list[float]], base: Parameters) -> dict[Cause, float]:
    """Return the recoveries by cause; causes that no run shows take as long as those that were measured."""
    measured = {cause: max(0.0, median(values)) for cause, values in found.items()}
    if not measured:
        return dict(base.recovery_seconds)
    return {cause: measured.get(cause, median(measured.values())) for cause in base.recovery_seconds}


def _per_step(found: Sequence[tuple[float, int]], paused: float) -> float:
    """Return the mean duration of a step.

    Args:
        found: seconds between two reported steps, and number of steps.
        paused: seconds of all pauses for checkpoints among them.
    """
    usual = median(seconds / count for seconds, count in found)
    steps = [(seconds, count) for seconds, count in found if seconds <= _STALL * usual * count]
    # The pauses are those of the whole round, also before its first and after its last reported step. Those of a short
    # round may be longer than what was measured.
    return max(1e-6, usual / 2, (sum(seconds for seconds, _ in steps) - paused) / sum(count for _, count in steps))


def _median(values: Sequence[float], default: float) -> float:
    return max(0.0, median(values)) if values else default
