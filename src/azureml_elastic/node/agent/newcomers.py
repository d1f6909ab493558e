"""Whether a round may be ended, so that waiting nodes join. Pure functions.

A program with a session stops at a step boundary, which is not worth it shortly before its end. One without a session
has no step boundary: its workers are ended, and the next ones begin where the program itself resumes. All work since
its last save is lost, so the round goes on until the program has saved, or for a minimum time.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONGEST_SECONDS", "RoundProgress", "ends_soon", "may_end_round", "minimum_seconds"]

_REMAINING_SECONDS = 1.0
"""A newcomer is not let in any more when the run will end sooner than this: it would only hold it up."""

LONGEST_SECONDS = 3600.0
"""Longest time for which newcomers wait, unless the configured minimum is longer."""


def ends_soon(seconds_left: float | None) -> bool:
    """Return whether the training ends too soon for newcomers; ``None`` if it is unknown when."""
    return seconds_left is not None and seconds_left < _REMAINING_SECONDS


@dataclass(frozen=True)
class RoundProgress:
    """What is known of the progress of a round.

    Args:
        seconds: seconds since the workers of rank 0's node were started.
        connected_seconds: seconds since workers of the round have used its store to connect to each other, ``None``
            before.
        saved: whether the program has completed a file of its state in this round, and since its workers have
            connected if they have.
        world_size: number of workers.
    """

    seconds: float
    connected_seconds: float | None
    saved: bool
    world_size: int


def minimum_seconds(configured: float, unsaved_rounds: int) -> float:
    """Return for how long a round trains before newcomers may end it without a save.

    It doubles with each round that newcomers have ended before the program saved: whatever the program's own interval
    between two saves is, a round that is long enough for one follows.

    Args:
        configured: minimum of the first round in seconds.
        unsaved_rounds: number of rounds in succession that newcomers have ended before the program saved.
    """
    longest = max(configured, LONGEST_SECONDS)
    doublings = min(unsaved_rounds, 64)  # more would exceed every bound, and then the range of a float
    return min(configured * 2.0**doublings, longest)


def may_end_round(progress: RoundProgress, configured: float, unsaved_rounds: int) -> bool:
    """Return whether newcomers may end the round now.

    A program that has saved since its workers have connected to each other has trained. Otherwise the minimum counts
    from that moment, which is after their imports and before their first step; a single worker may never connect, and
    counts from its start. Workers of several that do not connect have not begun to train, unless they connect by other
    means than the round's store: their saves, which may be prepared data, count after the minimum, and without a save
    newcomers wait for the longest time.

    Args:
        progress: progress of the round.
        configured: minimum training time of a round in seconds.
        unsaved_rounds: number of rounds in succession that newcomers have ended before the program saved.
    """
    minimum = minimum_seconds(configured, unsaved_rounds)
    trained = progress.connected_seconds
    if trained is None and progress.world_size == 1:
        trained = progress.seconds
    if trained is None:
        return progress.seconds >= (minimum if progress.saved else max(configured, LONGEST_SECONDS))
    return progress.saved or trained >= minimum
