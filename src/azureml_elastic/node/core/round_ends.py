"""The version of the round's row that ends a round: the next open one, or the end of the run. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from azureml_elastic.node.core.actions import Close, Reopen
from azureml_elastic.node.core.failures import aged
from azureml_elastic.node.core.round import Member, Round, reopened


@dataclass(frozen=True)
class EndFacts:
    """What the node that ends a round knows besides.

    Args:
        seconds: duration of the round on its clock.
        waiting: spares, which the next round waits for.
        absent: members that have never connected to rank 0's hub, of those that are lost.
        why_absent: why they have not, in words.
    """

    seconds: float = 0.0
    waiting: Collection[str] = ()
    absent: frozenset[str] = frozenset()
    why_absent: str = ""


def version_after(
    round_: Round, how: Reopen | Close, facts: EndFacts, *, max_failed_rounds: int, advice: str = ""
) -> Round:
    """Return the version that a node writes to end a sealed round.

    A round whose lost members have all never connected has failed by nobody's fault but the network's, unless a worker
    has failed. Too many of these in a row end the run.

    Args:
        advice: what to do where nodes cannot reach each other.
    """
    if isinstance(how, Close):
        return _closed(round_, how, facts)
    reason, round_failed = how.reason, how.round_failed
    if facts.absent and not how.failures:
        round_failed = round_failed or how.lost == facts.absent
        reason = f"{reason}: {facts.why_absent}"
    following = reopened(
        round_,
        reason,
        how.lost,
        sorted(facts.waiting),
        finishing=how.finishing,
        finishing_seconds=how.finishing_seconds,
        failures=how.failures,
        seconds=facts.seconds,
        round_failed=round_failed,
    )
    if following.failed_rounds < max_failed_rounds:
        return following
    message = (
        f"{following.failed_rounds} rounds in a row broke because nodes could not reach each other, the last one "
        f"because {reason}. {advice}"
    )
    return _closed(round_, Close(succeeded=False, exit_code=1, message=message), facts)


def left_in_order(rows: Collection[Member]) -> frozenset[str]:
    """Return the members that have left before they could enter the round, according to their rows."""
    # Nodes that cannot reach rank 0's say that they have left, too, until they can.
    return frozenset(row.node for row in rows if row.state == "left" and not row.unreached)


def _closed(round_: Round, how: Close, facts: EndFacts) -> Round:
    return replace(
        round_,
        state="succeeded" if how.succeeded else "failed",
        message=how.message[:30_000],
        exit_code=how.exit_code,
        failures=how.failures or aged(round_.failures, facts.seconds),
    )
