"""The heartbeat's row of a round, by which nodes outside of it know that rank 0's node runs: what is written. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeartbeatRow:
    """The row as a node has written it last.

    Args:
        version: version of the row in the table.
        beats: number of writes in its round.
        by: incarnation of the writer, empty where another node has asked it to look at the round's row.
    """

    version: str
    round: int
    beats: int
    by: str = ""


@dataclass(frozen=True)
class Overtaken:
    """What follows where the row is not as the writer has left it.

    Args:
        given_up: whether a newer round writes the row, so that this writer ends.
        look: whether the round's row has to be looked at.
        again: whether to write once more at once.
    """

    given_up: bool = False
    look: bool = False
    again: bool = False


class HeartbeatWriter:
    """The writes of one round.

    Args:
        number: number of the round.
        me: incarnation of this node.
        found: the row before the first write.

    Attributes:
        version: version of the row that is replaced, ``None`` where there is none.
    """

    def __init__(self, number: int, me: str, found: HeartbeatRow | None) -> None:
        self._number, self._me = number, me
        self.version = found.version if found is not None and found.round <= number else None
        self._beats = self._confirmed = 0
        self._repeats = False

    def beat(self) -> dict[str, Any]:
        """Return the fields of the next write."""
        self._beats += 1
        return {"round": self._number, "beats": self._beats, "by": self._me}

    def written(self, version: str) -> bool:
        """Take in that the row was written; return whether this was the first time.

        What was lost before then does not show in this row: the round's has to be compared.
        """
        first = not self._confirmed
        self.version, self._confirmed, self._repeats = version, self._beats, False
        return first

    def unanswered(self) -> None:
        """Take in that it is not known whether the row was written."""
        self._repeats = False

    def overtaken(self, row: HeartbeatRow | None) -> Overtaken:
        """Take in that the row was another one, and return what follows."""
        if row is not None and row.round > self._number:
            return Overtaken(given_up=True)
        self.version = None if row is None else row.version
        # A row of an earlier round may have as many beats.
        known = (self._number, self._confirmed)
        look = bool(self._confirmed) and (row is None or row.by != self._me or (row.round, row.beats) < known)
        # An answer that was lost leaves the row newer than known: once more at once, else a spare could take the gap
        # for the end of the round.
        self._repeats = not self._repeats
        return Overtaken(look=look, again=self._repeats)
