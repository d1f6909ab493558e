"""How fast the tests' runs train: none is over before the nodes that it is about have come."""

from __future__ import annotations

import argparse
import time

from azureml_elastic.train import Session

_SLOWER = 5
_GROWTH = 1.15
_LONGEST_S = 2.0
_GATHERED = 20


class Pace:
    """Sleeps after each step.

    While workers are missing, or a fault is due, a step takes five times as long, and each further one a little longer
    still: where nodes come and faults strike quickly little is lost, and on a busy machine they have minutes.

    Args:
        arguments: arguments from a parser with those of :meth:`add_arguments`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._delay = arguments.step_delay
        self._full = arguments.full
        self._gather = arguments.gather
        self._slow = self._delay * _SLOWER
        self._fault_at = arguments.fault_at
        self._gathered_in: int | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add what says how long a step takes."""
        parser.add_argument("--step-delay", type=float, default=0.05)
        parser.add_argument("--full", type=int, default=0, help="go slowly while there are fewer workers")
        parser.add_argument("--gather", type=int, default=0, help=f"the same, in the first {_GATHERED} steps alone")
        parser.add_argument("--fault-at", type=int, default=0, help="go slowly from this step until a new round begins")

    def rest(self, run: Session) -> None:
        """Sleep after a step."""
        wanted = max(self._full, self._gather) if run.steps < _GATHERED else self._full
        if run.world_size >= wanted and not self._fault_is_due(run):
            self._slow = self._delay * _SLOWER
            time.sleep(self._delay)
            return
        time.sleep(self._slow)
        self._slow = min(_LONGEST_S, self._slow * _GROWTH)

    def _fault_is_due(self, run: Session) -> bool:
        """Return whether the step of the fault is reached in the round in which workers had gathered."""
        if run.steps == _GATHERED:
            self._gathered_in = run.round
        return run.steps >= self._fault_at > 0 and run.round == self._gathered_in
