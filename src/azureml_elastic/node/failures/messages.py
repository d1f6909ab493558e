"""What a failed run tells its user: the program's own words first, then what happened where, and what to do."""

from __future__ import annotations

from azureml_elastic.node.failures.restart_policy import FailureKind, FailureRecord

__all__ = ["WORDS", "closing_message"]

WORDS: dict[FailureKind, str] = {
    "out_of_memory": "it ran out of memory",
    "peer": "its connection to the other workers broke",
    "import": "its program could not be loaded",
    "user": "its program raised an exception",
    "killed": "it was killed from outside",
    "crashed": "it crashed",
    "exit": "its program ended with an error code",
    "hang": "it made no step for too long",
}
"""Each kind as the end of a sentence."""

_ADVICE: dict[FailureKind, str] = {
    "out_of_memory": (
        "Make the batch of each worker smaller (a smaller global_batch_size, or more nodes), or take nodes with more "
        "memory. Fewer DataLoader workers save memory of the machine, gradient checkpointing saves that of the GPU"
    ),
    "peer": (
        "Look at the logs of the other nodes for the first error. If there is none, allow TCP between the nodes on all "
        "ports, set AZUREML_ELASTIC_LOCAL_ADDRESS where a node has several addresses, and let collectives that take "
        "long have a longer timeout in init_process_group"
    ),
    "import": (
        "Install what is missing in the environment of the nodes, or add the file to the folder that is submitted; "
        "then submit again"
    ),
    "user": "Correct the program and submit it again",
    "killed": (
        "Look for what sent the signal: a limit of the container's memory, an operator, another program on the machine"
    ),
    "crashed": (
        "Set PYTHONFAULTHANDLER=1 to have the Python stack of the next crash, and look at native libraries, their "
        "versions and the machine's memory"
    ),
    "exit": "Look for the exit code in the program, and in its last lines of output",
    "hang": "Look at the stacks for the worker that waits somewhere else than the others",
}


def closing_message(message: str, failure: FailureRecord, number: int, why: str) -> str:
    """Return the last message of a run: the failure's own words, an empty line, and one paragraph.

    Args:
        message: the traceback, or the last lines.
        failure: what ended the run.
        number: number of the round.
        why: why there was no restart.
    """
    step = "" if failure.step is None else f" at step {failure.step}"
    return (
        f"{message}\n\nWorker {failure.rank} on {failure.node} failed in round {number}{step} with exit code "
        f"{failure.exit_code}: {WORDS[failure.kind]}. {why} {_ADVICE[failure.kind]}; see "
        "docs/explanation/failures.md. Committed checkpoints are kept."
    )
