"""What a process that hangs waits for, in one line: the collective, and the program's line that has called it.

It is read from the stack of the main thread. Where ranks wait in different collectives, these lines show it without a
comparison of whole stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from azureml_elastic.node.failures.classification import FailedWorker
from azureml_elastic.node.failures.tracebacks import Frame

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


def whereabouts(stacks: str) -> str:
    """Return where the main thread is, as the rest of a sentence; empty where the stacks do not tell.

    Args:
        stacks: stacks by :mod:`faulthandler`, innermost call first, the main thread before the others.
    """
    lines = map(_FRAME.match, stacks.partition("\n\n")[0].splitlines())
    return _whereabouts([Frame(found["file"], int(found["line"]), found["function"]) for found in lines if found])


def waited_lines(failures: Mapping[int, FailedWorker]) -> str:
    """Return a line for each worker whose recorded error was raised in a collective; by its rank."""
    frames = {
        rank: each.error.chain[-1].frames[::-1] for rank, each in sorted(failures.items()) if each.error is not None
    }
    places = {rank: _whereabouts(found) for rank, found in frames.items()}
    return "".join(f"rank {rank} {place}\n" for rank, place in places.items() if place.startswith("waits in "))


def _whereabouts(frames: Sequence[Frame]) -> str:
    own = next((at for at, frame in enumerate(frames) if frame.own), None)
    if own is None:
        return ""
    where = f"{frames[own].file}:{frames[own].line} in {frames[own].function}"
    if own == 0:
        return f"is at {where}"
    # The outermost one: all_gather_object(), for example, calls others.
    inside = [frame.function for frame in frames[:own] if frame.file.endswith(_COLLECTIVES)]
    call = f"waits in {inside[-1]}" if inside else f"is in {frames[own - 1].function}"
    return f"{call}, called at {where}"
