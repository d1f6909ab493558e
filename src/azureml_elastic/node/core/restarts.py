"""What follows a failure that neither another node nor a notice explains: another round, or the end of the run."""

from __future__ import annotations

from azureml_elastic.config import Plan
from azureml_elastic.config.exit_codes import of_failed_run
from azureml_elastic.node.core.closing_message import closing_message
from azureml_elastic.node.core.failures import Failure, FailureRecord, aged, decide_restart
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.core.training_actions import Close, Log, Reopen

__all__ = ["charge"]


def charge(
    failure: Failure,
    record: FailureRecord,
    reason: str,
    *,
    lost: frozenset[str],
    round_: Round,
    seconds: float,
    plan: Plan,
) -> tuple[Log, Reopen] | tuple[Close]:
    """Return what to do.

    Args:
        failure: the failure.
        record: its record.
        reason: why the round ends.
        lost: members that the next round does not wait for.
        round_: the round.
        seconds: its duration so far.
        plan: configuration of the run, with the limits of the restart policy.
    """
    decision = decide_restart(
        aged(round_.failures, seconds),
        record,
        plan.distribution,
        conclusive=failure.conclusive,
        seconds=seconds,
        failed_rounds=round_.failed_rounds,
        max_failed_rounds=plan.rendezvous.timings.max_failed_rounds,
    )
    if decision.restart:
        log = Log(f"{reason} ({failure.signature}); {decision.why}.", warning=True)
        return log, Reopen(reason, lost, failures=decision.failures, round_failed=decision.round_failed)
    message = closing_message(failure.message, record, round_.number, decision.why)
    code = of_failed_run(failure.exit_code)
    return (Close(succeeded=False, message=message, exit_code=code, failures=decision.failures),)
