"""Looks at the round's row while a round runs, because a hub or the heartbeat's row has shown that it has changed."""

from __future__ import annotations

from azureml_elastic.errors import TableUnavailable
from azureml_elastic.node.core.round import Round, is_same_round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.state.rows import RowLook, Rows

__all__ = ["RoundLook"]


class RoundLook:
    """At most one look at a time, on a thread: a member must see notices and votes while the table does not answer.

    Args:
        context: threads, and ``wake``, which is set when the row was read.
        rows: table rows.
    """

    def __init__(self, context: Context, rows: Rows) -> None:
        self._context = context
        self._rows = rows
        self._is_requested = False
        self._looking: Round | None = None
        self._found: tuple[Round, RowLook] | None = None

    def request(self) -> None:
        """Have the agent's thread look at the round's row and the run's key. Thread-safe."""
        self._is_requested = True
        self._context.wake.set()

    def has_changed(self, round_: Round) -> bool:
        """Return whether a look has found another version than this one; begin one where it is requested.

        Raises:
            UsageError: the table holds the key of another program's run.
        """
        found, self._found = self._found, None
        if found is not None and found[0] is round_:  # not of a look at the round before
            try:
                return not is_same_round(self._rows.observe(found[1]), round_)
            except TableUnavailable:
                self._is_requested = True
                return False
        if self._is_requested and self._looking is None:
            self._is_requested, self._looking = False, round_
            self._context.runtime.thread(self._look, "look at the round").start()
        return False

    def _look(self) -> None:
        round_ = self._looking
        assert round_ is not None
        try:
            self._found = round_, self._rows.look()
        except TableUnavailable:
            self._is_requested = True  # at the next turn: a table that fails at once must not keep the agent busy
        else:
            self._context.wake.set()
        finally:
            self._looking = None
