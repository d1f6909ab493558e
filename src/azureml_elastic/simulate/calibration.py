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
from azureml_elastic.ledger.accounting import Cause, Span, account
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
from azureml_elastic.simulate.scenario import Parameters

__all__ = ["calibrate"]

_TRAINS = ("training", "saving", "lost work")

_STALL = 10.0
"""Duration of a step, as a multiple of the median, from which a node has stalled: no property of the program."""

_Steps = dict[tuple[str, int], list[Progress]]
"""Reported steps by node and round, in order."""


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
            "checkpoint_pause_seconds": _mean(samples.pause, base.checkpoint_pause_seconds),
            "checkpoint_write_seconds": _median(samples.write, base.checkpoint_write_seconds),
            "finish_seconds": _median(samples.finish, base.finish_seconds),
        }
    )


def _measure(events: Sequence[Event], samples: _Samples) -> None:
    spans = account(events)
    first_steps: dict[tuple[str, int], float] = {}
    for span in spans:
        if span.activity in _TRAINS:
            key = span.node, span.round
            first_steps[key] = min(span.started, first_steps.get(key, span.started))
    entries = {(event.node, event.round): event for event in events if isinstance(event, RoundEntered)}
    first = min((number for _, number in entries), default=0)
    ready = {event.node: event.time for event in events if isinstance(event, NodeReady)}
    _measure_starts(events, ready, first, samples)
    # The node that was ready last has waited for the shortest time.
    waits = [time - ready[node] for (node, number), time in first_steps.items() if number == first and node in ready]
    samples.first_step += [min(waits)] if waits else []
    steps: _Steps = {}
    for event in sorted(events, key=lambda event: event.time):
        if isinstance(event, Progress):
            own = steps.setdefault((event.node, event.round), [])
            if not own or event.step > own[-1].step:  # the last step may be reported twice
                own.append(event)
    _measure_recoveries(events, spans, first_steps, steps, samples)
    _measure_steps(steps, spans, entries, samples)
    for event in events:
        own = steps.get((event.node, event.round), [])
        if isinstance(event, CheckpointCommitted):
            samples.pause.append(event.seconds)
            samples.write += [
                max(0.0, event.time - each.time - event.seconds) for each in own if each.step == event.step
            ]
        elif isinstance(event, RunEnded) and event.succeeded and own:
            samples.finish.append(event.time - own[-1].time)


def _measure_starts(events: Sequence[Event], ready: Mapping[str, float], first: int, samples: _Samples) -> None:
    """Measure the time until a node is ready, apart for nodes that are not in the first round."""
    early = {event.node for event in events if isinstance(event, RoundEntered) and event.round == first}
    for event in events:
        if isinstance(event, NodeStarted) and event.node in ready:
            began = event.time if event.began is None else event.began
            (samples.start if event.node in early else samples.joining_start).append(ready[event.node] - began)


def _measure_recoveries(
    events: Sequence[Event],
    spans: Sequence[Span],
    first_steps: dict[tuple[str, int], float],
    steps: _Steps,
    samples: _Samples,
) -> None:
    """Measure the time from the end of a round, as its reporter knows it, to its first step in the next one.

    At a step boundary the round ends with its last step; otherwise it ends when the loss is noticed.
    """
    causes: dict[tuple[str, int], Cause] = {}
    for span in spans:  # of the two spans with a cause in a round, the one at its end is the later one
        if span.cause is not None:
            causes[span.node, span.round] = span.cause
    for event in events:
        if not isinstance(event, RoundReopened):
            continue
        begun, cause = first_steps.get((event.node, event.round + 1)), causes.get((event.node, event.round))
        if begun is None or cause is None:
            continue
        own = steps.get((event.node, event.round))
        ended = own[-1].time if own and event.reason == "rescale at a step boundary" else event.time
        samples.recovery.setdefault(cause, []).append(begun - ended)


def _measure_steps(
    steps: _Steps, spans: Sequence[Span], entries: dict[tuple[str, int], RoundEntered], samples: _Samples
) -> None:
    """Measure the duration of steps by number of nodes, on rank 0's node, without the pauses for checkpoints."""
    pauses: dict[tuple[str, int], float] = {}
    for span in spans:
        if span.activity == "saving":
            pauses[span.node, span.round] = pauses.get((span.node, span.round), 0.0) + span.seconds
    for place, entry in entries.items():
        own = steps.get(place, [])
        if entry.rank == 0 and len(own) > 1:
            measured = samples.steps.setdefault(len(entry.members), [])
            measured += [(after.time - each.time, after.step - each.step) for each, after in pairwise(own)]
            samples.paused[len(entry.members)] = samples.paused.get(len(entry.members), 0.0) + pauses.get(place, 0.0)


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


def _mean(values: Sequence[float], default: float) -> float:
    return fmean(values) if values else default
