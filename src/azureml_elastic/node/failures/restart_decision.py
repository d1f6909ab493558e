"""What a failure costs the run: another round, or its end."""

from __future__ import annotations

import logging
from typing import Any

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.exit_codes import of_failed_run
from azureml_elastic.ledger.events import RoundReopened, RunEnded, WorkerFailed
from azureml_elastic.node.agent.event_recorder import Recorder
from azureml_elastic.node.failures.classification import Failure
from azureml_elastic.node.failures.messages import closing_message
from azureml_elastic.node.failures.restart_policy import decide_restart
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous

__all__ = ["apply_restart_policy"]

_LOG = logging.getLogger(__name__)


def apply_restart_policy(
    failure: Failure,
    *,
    step: int | None,
    reason: str,
    lost: frozenset[str],
    rendezvous: Rendezvous,
    recorder: Recorder,
    distribution: ElasticDistribution,
) -> Failure | None:
    """Charge a failure to the run, and end the round or the run.

    Args:
        failure: failure of a worker of this node.
        step: the furthest that this node's workers have completed, ``None`` where they do not say.
        reason: why the round ends.
        lost: members that the others shall not wait for.
        rendezvous: this node's place in the round.
        recorder: recorder of the ledger's events.
        distribution: the terms.

    Returns:
        The failure with which the run has ended; ``None`` where there is another round, or another node has ended this
        one first.
    """
    round_ = rendezvous.assignment.round
    record = failure.record(rendezvous.node, step)
    verdict = decide_restart(
        rendezvous.failures,
        record,
        distribution,
        conclusive=failure.conclusive,
        seconds=rendezvous.seconds_in_round,
        failed_rounds=round_.failed_rounds,
    )

    def note(kind: type[Any], **fields: Any) -> None:
        recorder.record(kind, round_.number, **fields)

    note(
        WorkerFailed,
        rank=failure.rank,
        exit_code=failure.exit_code,
        message=failure.message,
        failure_kind=failure.kind,
        signature=failure.signature,
        step=record.step,
    )
    if verdict.restart:
        _LOG.warning("%s: %s; %s.", reason, failure.signature, verdict.why)
        if rendezvous.reopen(reason, lost=lost, failures=verdict.failures, round_failed=verdict.round_failed):
            note(RoundReopened, reason=reason, lost=tuple(lost))
        return None
    message = closing_message(failure.message, record, round_.number, verdict.why)
    code = of_failed_run(record.exit_code)
    if not rendezvous.close(succeeded=False, message=message, exit_code=code, failures=verdict.failures):
        return None
    note(RunEnded, succeeded=False, message=message)
    return Failure(failure.rank, code, message)
