"""What is true when the round's row went back in time or is gone: the highest round that a living node knows.

A failover of the storage may lose the last writes, and a table may be cleaned or made again while nodes are in a round.
A node that has read, written or received a version of the row, and then reads an older one, writes the row again with a
higher number than any that it knows, by the same compare-and-swap as any other change. All nodes join that round. A
node of a later round that finds this one does the same, so the highest number of all living nodes remains.
"""

from __future__ import annotations

from dataclasses import replace

from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.sealing import reopened

__all__ = ["describe_loss", "has_gone_back", "is_same_round", "restored"]


def has_gone_back(row: Round, known: Round | None) -> bool:
    """Return whether the row holds an older version than one that was known before it was read."""
    return known is not None and known.is_newer_than(row)


def describe_loss(row: Round, known: Round) -> str:
    """Return the reason of the round that replaces the lost one."""
    is_gone = row == Round()
    found = "is gone" if is_gone else f"went back to round {row.number} ({row.state})"
    return f"the table's row of round {known.number} ({known.state}) {found}"


def restored(row: Round, known: Round) -> Round:
    """Return the version to write in place of an older one: the next open round, or the end of the run once more.

    Args:
        row: version that the table holds.
        known: newest version that this node knows.
    """
    if known.closed:
        return known
    reason = describe_loss(row, known)
    if known.state == "sealed":
        return reopened(known, reason)
    # Another node may have sealed it, and that version may be lost, too.
    return replace(known, number=known.number + 1, reason=reason)


def is_same_round(row: Round, mine: Round) -> bool:
    """Return whether the row still holds this sealed round, and not another one of the same number."""
    if (row.number, row.state) != (mine.number, mine.state):
        return False
    return [member.incarnation for member in row.members] == [member.incarnation for member in mine.members]
