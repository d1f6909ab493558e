"""The closing message of a run that a worker's failure has ended."""

from __future__ import annotations

from azureml_elastic.node.core.failures import FailureKind, FailureRecord

__all__ = ["SUMMARIES", "closing_message"]

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
