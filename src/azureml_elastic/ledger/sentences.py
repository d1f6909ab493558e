"""Events in one line: the same words in the terminal, on the page and in published tags."""

from __future__ import annotations

from collections.abc import Iterable

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    CheckpointQuarantined,
    Event,
    HangDetected,
    HealthChecked,
    HostQuarantined,
    HostStruck,
    NodeLeft,
    NodeStarted,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    Unreachable,
    WorkerFailed,
)
from azureml_elastic.plurals import counted

_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_HEADLINE = 300


def describe(event: Event) -> str | None:
    """Return a one-line description of an event, ``None`` for events that are not shown."""
    number = f"round {event.round}"
    match event:
        case NodeStarted():
            return f"{event.node} has started"
        case RoundEntered():
            return f"{number}: {counted(event.world_size, 'worker')} on {', '.join(event.members)}"
        case Restored():
            return f"{number}: " + (
                f"training goes on after step {event.step}" if event.step else "starts from scratch"
            )
        case CheckpointCommitted():
            paused = f"{event.seconds * 1000:.0f} ms"
            return f"checkpoint of step {event.step} committed, training paused for {paused}"
        case CheckpointQuarantined():
            return f"the checkpoint {event.directory} is damaged, an older one is used: {headline(event.problems)}"
        case WorkerFailed():
            kind = f" ({event.failure_kind.replace('_', ' ')})" if event.failure_kind else ""
            after = "" if event.step is None else f" after step {event.step}"
            text = f"{event.process} on {event.node} failed{after} with exit code {event.exit_code}{kind}"
            return f"{text}: {headline(event.message)}" if event.message.strip() else text
        case HangDetected():
            limit = f"{event.seconds:.1f} s (limit {event.limit_seconds:.1f} s)"
            return f"no step for {limit} after step {event.step}; the stacks of all workers are in the nodes' logs"
        case HealthChecked() if event.problems:
            state = "unhealthy" if event.status == "fail" else "warned"
            return f"{event.node} is {state}: {'; '.join(map(headline, event.problems))}"
        case HostStruck():
            return f"a strike against {event.host}: {headline(event.reason)}"
        case HostQuarantined():
            return f"{event.node} is quarantined: {counted(event.strikes, 'strike')} against {event.host}"
        case Unreachable():
            where = f"{event.peer} ({event.address}), {event.purpose}"
            return f"{event.node} ({event.host}) cannot reach {where}: {headline(event.error)}"
        case RoundReopened():
            return f"{number} ends: {reason_and_losses(event.reason, event.lost)}"
        case NodeLeft():
            return f"{event.node} leaves: {event.reason}"
        case RunEnded():
            return "the run succeeded" if event.succeeded else f"the run failed: {headline(event.message)}"
    return None


def reason_and_losses(reason: str, lost: Iterable[str]) -> str:
    """Return the reason of a round's end, with those lost nodes that it does not name."""
    unnamed = [node for node in lost if node not in reason]
    return f"{reason} (lost: {', '.join(unnamed)})" if unnamed else reason


def headline(message: str) -> str:
    """Return a message in one line: the exception, where it contains a traceback, otherwise its first line."""
    lines = message.splitlines()
    begin = max((at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=None)
    if begin is not None:
        found = next((line for line in lines[begin + 1 :] if line.strip() and not line[0].isspace()), "")
    else:
        found = next((line for line in lines if line.strip()), "")
    return found if len(found) <= _LONGEST_HEADLINE else f"{found[: _LONGEST_HEADLINE - 3]}..."
