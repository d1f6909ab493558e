"""Application of the restart policy to a failure: the next round, or the end of the run with a closing message."""

from __future__ import annotations

import logging

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.exit_codes import of_failed_run
from azureml_elastic.ledger.events import RoundReopened, RunEnded, WorkerFailed
from azureml_elastic.node.core.failures import FailureKind, FailureRecord, decide_restart
from azureml_elastic.node.failures.classification import Failure
from azureml_elastic.node.io.event_recorder import Recorder
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous

__all__ = ["SUMMARIES", "apply_restart_policy", "closing_message"]

_LOG = logging.getLogger(__name__)

SUMMARIES: dict[FailureKind, str] = {
    "out_of_memory": "it ran out of memory",
    "peer": "its connection to the other workers broke",
    "import": "its program could not be loaded",
    "user": "its program raised an exception",
    "killed": "it was killed from outside",
    "crashed": "it crashed",
    "exit": "its program ended with an error code",
    "hang": "it made no step for too long",
    "nonfinite": "its loss or weights are NaN or infinite",
}
"""Summary of each kind of failure, as the end of a sentence about a worker."""

_ADVICE: dict[FailureKind, str] = {
    "out_of_memory": (
        "Reduce the batch of each worker (a smaller global_batch_size, or more nodes), or use nodes with more memory. "
        "Fewer DataLoader workers save memory of the machine, gradient checkpointing saves memory of the GPU"
    ),
    "peer": (
        "Look for the first error in the logs of the other nodes. If there is none, allow TCP between the nodes on all "
        "ports, set AZUREML_ELASTIC_LOCAL_ADDRESS on nodes with several addresses, and give init_process_group a "
        "longer timeout for slow collectives"
    ),
    "import": (
        "Install what is missing in the environment of the nodes, or add the file to the submitted folder; then submit "
        "again"
    ),
    "user": "Correct the program and submit it again",
    "killed": (
        "Find the sender of the signal: a limit of the container's memory, an operator, another program on the machine"
    ),
    "crashed": (
        "Set PYTHONFAULTHANDLER=1 to get the Python stack of the next crash, and check native libraries, their "
        "versions and the machine's memory"
    ),
    "exit": "Look for the exit code in the program, and at its last lines of output",
    "hang": "Find the worker whose stack differs from those of the others",
    "nonfinite": (
        "Lower the learning rate, clip the gradients or look at the data of this step, and submit again: the last "
        "checkpoint is of finite weights"
    ),
}


def apply_restart_policy(
    failure: Failure,
    *,
    step: int | None,
    connected: bool,
    reason: str,
    lost: frozenset[str],
    rendezvous: Rendezvous,
    recorder: Recorder,
    distribution: ElasticDistribution,
) -> Failure | None:
    """Record a failure, and reopen the round or close the run.

    Args:
        failure: failure of a worker of this node.
        step: last step that this node's workers completed, ``None`` if unknown.
        connected: whether the workers of the round had begun to connect to each other, as far as is known.
        reason: reason for the end of the round.
        lost: members that the next round does not wait for.
        rendezvous: rendezvous of this node.
        recorder: recorder of the ledger's events.
        distribution: limits of the restart policy.

    Returns:
        The failure that closed the run; ``None`` if another round follows or another node has ended this one first.
    """
    membership, round_end = rendezvous.membership, rendezvous.round_end
    number, failed_rounds = membership.last_round, membership.assignment.round.failed_rounds
    record = failure.record(rendezvous.node, step, connected=connected)
    decision = decide_restart(
        membership.failures,
        record,
        distribution,
        conclusive=failure.conclusive,
        seconds=membership.seconds,
        failed_rounds=failed_rounds,
    )
    recorder.record(
        WorkerFailed,
        number,
        rank=failure.rank,
        exit_code=failure.exit_code,
        message=failure.message,
        failure_kind=failure.kind,
        signature=failure.signature,
        step=step,
    )
    if decision.restart:
        _LOG.warning("%s (%s); %s.", reason, failure.signature, decision.why)
        if round_end.reopen(reason, lost=lost, failures=decision.failures, round_failed=decision.round_failed):
            recorder.record(RoundReopened, number, reason=reason, lost=tuple(lost))
        return None
    message = closing_message(failure.message, record, number, decision.why)
    code = of_failed_run(failure.exit_code)
    if not round_end.close(succeeded=False, message=message, exit_code=code, failures=decision.failures):
        return None
    recorder.record(RunEnded, number, succeeded=False, message=message)
    return Failure(failure.rank, code, message)


def closing_message(message: str, failure: FailureRecord, number: int, why: str) -> str:
    """Return the message of a failed run: the worker's own message, an empty line, and an explanation with advice.

    Args:
        message: message of the worker's failure.
        failure: failure that ended the run.
        number: number of the round.
        why: reason for not restarting.
    """
    step = "" if failure.step is None else f" at step {failure.step}"
    return (
        f"{message}\n\nWorker {failure.rank} on {failure.node} failed in round {number}{step} with exit code "
        f"{failure.exit_code}: {SUMMARIES[failure.kind]}. {why} {_ADVICE[failure.kind]}; see "
        "docs/explanation/failures.md. Committed checkpoints are kept."
    )
