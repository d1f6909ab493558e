"""Whose fault the end of a round is, as far as exit codes and the lost members show it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from azureml_elastic.node.core.round import Member, Round

__all__ = ["KILLED", "died_after_training", "faulty_members"]

_TERMINATED, _ABORTED = -15, -6
"""Exit codes after SIGTERM and SIGABRT, as Python has them."""

KILLED = 128 + 9
"""Exit code after SIGKILL, as a shell has it."""


def faulty_members(round_: Round, lost: Collection[str], leaving: Collection[str] = ()) -> list[Member]:
    """Return the lost members whose hosts get a strike.

    When more than half of the members are lost at once, a switch has failed or the reporting node itself is cut off, so
    that no host gets a strike.

    Args:
        round_: sealed round.
        lost: names of the lost members.
        leaving: names of the members that were preempted or left on their own.
    """
    gone = [member for member in round_.members if member.node in lost]
    if 2 * len(gone) > len(round_.members):
        return []
    return [member for member in gone if member.node not in leaving]


def died_after_training(codes: Mapping[int, int], finished: Collection[int], *, trained: bool) -> bool:
    """Tell whether torch has aborted a worker that had finished, as its threads sometimes do at interpreter exit.

    Such a round is repeated free of charge, but only if it has trained: the next one has nothing left to train.

    Args:
        codes: exit codes of the workers that did not end well, by local rank; negative: the signal.
        finished: local ranks whose training has ended.
        trained: whether a local worker has completed a step in this round.
    """
    aborted = {local_rank: code for local_rank, code in codes.items() if code != _TERMINATED}
    return (
        trained
        and bool(aborted)
        and all(code == _ABORTED for code in aborted.values())
        and aborted.keys() <= set(finished)
    )
