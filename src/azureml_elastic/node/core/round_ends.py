"""What follows a round: whose fault a failure is, another round or the end of the run, and the version that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from azureml_elastic.config import Plan
from azureml_elastic.config.exit_codes import of_failed_run
from azureml_elastic.node.core.actions import Close, Log, Reopen
from azureml_elastic.node.core.failures import Failure, FailureKind, FailureRecord, aged, decide_restart
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


SUMMARIES: dict[FailureKind, str] = {
    "out_of_memory": "it ran out of memory",
    "peer": "its connection to the other workers broke",
    "import": "its program could not be loaded",
    "user": "its program raised an exception",
    "killed": "it was killed from outside",
    "crashed": "it crashed",
    "exit": "its program ended with an error code",
    "hang": "it made no step for too long",
    "timeout": "other workers did not come to the collective in which it has waited for as long as torch allows",
    "nonfinite": "its loss or weights are NaN or infinite",
    "store": "no worker can connect without it",
}
"""Summary of each kind of failure, as the end of a sentence about a worker."""

_ADVICE: dict[FailureKind, str] = {
    "out_of_memory": (
        "Reduce the batch of each worker (a smaller global_batch_size, or more nodes), or use nodes with more memory. "
        "Fewer DataLoader workers save memory of the machine, gradient checkpointing saves memory of the GPU"
    ),
    "peer": (
        "Look for the first error in the logs of the other nodes. If there is none, allow TCP between the nodes on all "
        "ports, and set AZUREML_ELASTIC_LOCAL_ADDRESS on nodes with several addresses"
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
    "timeout": (
        "The nodes are connected, so this is no failure of the network: find where the other workers were, at the end "
        "of their nodes' logs, and have all ranks call the same collectives in the same order. Where one of them works "
        "alone for so long, give init_process_group a longer timeout"
    ),
    "nonfinite": (
        "Lower the learning rate, clip the gradients or look at the data of this step, and submit again: the last "
        "checkpoint is of finite weights"
    ),
    "store": (
        "The store is torch's TCPStore, so look for the cause in the software and the memory of that node, not in the "
        "network: check its installation of torch, which must be 2.6 or newer"
    ),
}


def closing_message(message: str, failure: FailureRecord, number: int, why: str) -> str:
    """Return the message of a failed run: the worker's own message, an empty line, and an explanation with advice.

    Args:
        message: message of the worker's failure.
        failure: failure that ended the run.
        why: reason for not restarting.
    """
    step = "" if failure.step is None else f" at step {failure.step}"
    return (
        f"{message}\n\n{failure.process[0].upper()}{failure.process[1:]} failed in round {number}{step} with exit code "
        f"{failure.exit_code}: {SUMMARIES[failure.kind]}. {why} {_ADVICE[failure.kind]}; see "
        "docs/explanation/failures.md. Committed checkpoints are kept."
    )


def charge(
    failure: Failure,
    record: FailureRecord,
    reason: str,
    *,
    lost: frozenset[str],
    waiting: frozenset[str],
    round_: Round,
    seconds: float,
    plan: Plan,
) -> tuple[Log, Reopen] | tuple[Close]:
    """Return what to do.

    Args:
        lost: members that the next round does not wait for.
        waiting: spares that will be in it.
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
        next_size=size_with(waiting, round_, plan),
    )
    if decision.restart:
        log = Log(f"{reason} ({failure.signature}); {decision.why}.", warning=True)
        return log, Reopen(reason, lost, failures=decision.failures, round_failed=decision.round_failed)
    message = closing_message(failure.message, record, round_.number, decision.why)
    code = of_failed_run(failure.exit_code)
    return (Close(succeeded=False, message=message, exit_code=code, failures=decision.failures),)


def size_with(waiting: Collection[str], round_: Round, plan: Plan) -> int:
    """Return the number of workers of a round with these nodes besides, as far as the limits of the run allow."""
    resources, distribution = plan.resources, plan.distribution
    _, most = distribution.node_limits(resources.min_instance_count, resources.max_instance_count)
    count = min(most, len(round_.members) + len(waiting))
    if isinstance(distribution.nodes_per_replica, int):
        count -= count % distribution.nodes_per_replica
    return max(count, len(round_.members)) * round_.members[0].slots


_TERMINATED, _ABORTED = -15, -6
"""Exit codes after SIGTERM and SIGABRT, as Python has them."""

KILLED = 128 + 9
"""Exit code after SIGKILL, as a shell has it."""


def faulty_members(round_: Round, lost: Collection[str], leaving: Collection[str] = ()) -> list[Member]:
    """Return the lost members whose hosts get a strike.

    When more than half of the members are lost at once, a switch has failed or the reporting node itself is cut off, so
    that no host gets a strike.

    Args:
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
