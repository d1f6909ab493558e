"""What is known of the rounds of a script without a session, which reports no steps. Pure functions of the events.

Known are the beginning and the end of a round, the start of its workers, when these began to connect to each other,
which rank 0's node sees, and the last save, which the next round's node of rank 0 finds. As the clocks of two nodes are
never compared, each time that another node has written counts from that node's entry into the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from azureml_elastic.ledger.events import (
    Event,
    HangDetected,
    NodeLeft,
    RanksConnecting,
    RoundEntered,
    RoundReopened,
    RunEnded,
    StateSaved,
    WorkerFailed,
    WorkersStarted,
)

__all__ = ["UnreportedRound", "UnreportedWork", "connecting_seconds"]


@dataclass(frozen=True)
class UnreportedRound:
    """What the nodes have seen of one round, in seconds since their entries.

    Args:
        connecting: first attempt of workers to connect to each other; ``None`` if that was not seen.
        saved: the last save; ``None`` if none was found.
        ended: end of the round, as the first node noticed it; ``None`` where it has not ended.
        failed: whether a failed or hanging worker has ended it.
        succeeded: whether the run has ended well with it.
    """

    connecting: float | None = None
    saved: float | None = None
    ended: float | None = None
    failed: bool = False
    succeeded: bool = False

    @classmethod
    def of(cls, events: Sequence[Event]) -> UnreportedRound:
        """Return what is known by the events of one round."""
        saves = _since_entry(events, StateSaved)
        ends = _since_entry(events, RoundReopened, RunEnded)
        return cls(
            connecting_seconds(events),
            max(saves, default=None),
            min(ends, default=None),
            any(isinstance(event, WorkerFailed | HangDetected) for event in events),
            any(isinstance(event, RunEnded) and event.succeeded for event in events),
        )


@dataclass(frozen=True)
class UnreportedWork:
    """One node's part in a round, by the node's clock.

    Args:
        begun: beginning of its training; ``None`` if its workers have never got that far.
        kept: end of the work that was kept; what follows is lost where ``loses``, and otherwise unknown.
        ended: end of the round for it; infinite where it runs, or where nobody has recorded the end.
        loses: whether the work after ``kept`` was lost.
    """

    begun: float | None
    kept: float
    ended: float
    loses: bool

    @classmethod
    def of(cls, known: UnreportedRound, own: Sequence[Event], *, repeated: bool) -> UnreportedWork:
        """Return what is known of one node.

        Workers that have failed without having connected have not trained. Others that were not seen to connect may
        have trained, alone or by means of their own.

        Args:
            known: what the nodes have seen of the round.
            own: events of the node in the round, in order; one of them is its entry.
            repeated: whether a later round has begun.
        """
        entered = next(event.time for event in own if isinstance(event, RoundEntered))
        launched = next((event.time for event in own if isinstance(event, WorkersStarted)), entered)
        closing = [event.time for event in own if isinstance(event, RoundReopened | RunEnded | NodeLeft)]
        ended = min([*closing, math.inf if known.ended is None else entered + known.ended])
        if known.connecting is not None:
            begun: float | None = max(launched, entered + known.connecting)
        elif known.saved is None and (known.failed or not (known.succeeded or repeated)):
            begun = None
        else:
            begun = launched
        if known.succeeded or (known.ended is None and not repeated):
            kept, loses = ended, False
        elif known.saved is not None:
            kept, loses = entered + known.saved, repeated
        else:
            kept, loses = 0.0, False
        return cls(begun, kept, ended, loses)


def connecting_seconds(events: Sequence[Event]) -> float | None:
    """Return how long after the entry into a round its workers began to connect to each other, ``None`` if unknown."""
    return min(_since_entry(events, RanksConnecting), default=None)


def _since_entry(events: Sequence[Event], *kinds: type[Event]) -> list[float]:
    """Return the times of the events of these kinds in a round, each since the entry of the node that wrote it."""
    entries = {event.node: event.time for event in events if isinstance(event, RoundEntered)}
    return [max(0.0, e.time - entries[e.node]) for e in events if isinstance(e, kinds) and e.node in entries]
