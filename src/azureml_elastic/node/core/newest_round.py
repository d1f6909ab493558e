"""The newest version of the round that a node knows, so that a node which receives one need not read the table.

A node acts at once on a received round that follows the one that it knows: the seal of an open round, or the next
open round. Every node may write either of them, and repeating a round costs one restart. Any other received round, one
that is closed or leaves out a round, is only the reason to read the row.
"""

from __future__ import annotations

from azureml_elastic.node.core.round import Round

__all__ = ["NewestRound"]


class NewestRound:
    """Newest version of the round's row that this node has read or written, or whose seal it has received."""

    def __init__(self) -> None:
        self._round: Round | None = None

    @property
    def newest(self) -> Round | None:
        """The newest version, ``None`` before the first."""
        return self._round

    def observe(self, round_: Round) -> None:
        """Keep this version if it is newer."""
        if round_.is_newer_than(self._round):
            self._round = round_

    def accept(self, round_: Round) -> bool:
        """Keep a received version if it directly follows the one that this node knows, and is not closed.

        Returns:
            Whether it was kept, or nothing newer than what this node knows; otherwise the row must be read.
        """
        latest = self._round
        if latest is not None and not round_.is_newer_than(latest):
            return True
        following = [(latest.number, "sealed"), (latest.number + 1, "open")] if latest is not None else []
        if (round_.number, round_.state) not in following:
            return False
        self._round = round_
        return True

    def after(self, round_: Round) -> Round | None:
        """Return the newest version if it is newer than this one."""
        latest = self._round
        return latest if latest is not None and latest.is_newer_than(round_) else None
