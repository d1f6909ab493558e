"""What waiting nodes wait for, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from azureml_elastic.node.agent.saved_files import is_state_file
from azureml_elastic.node.preload.state_lookups import Lookups

__all__ = ["describe_wait"]

_MAX_NAMED = 3


def describe_wait(waiting: Iterable[str], lookups: Lookups, timeout: float | None) -> str:
    """Return what nodes wait for that come while a program without a session trains.

    Args:
        waiting: names of the nodes.
        lookups: where the program has looked at its start.
        timeout: seconds for which they wait at most, ``None`` for no limit.
    """
    limit = "" if timeout is None else f" They wait for {timeout:g} s at most."
    begin = f"{', '.join(sorted(waiting))}: waiting, as the program has no session and is restarted for a new node. "
    # Files with the name of a state first: others may be data.
    paths = sorted(lookups.files | lookups.folders, key=lambda path: (not is_state_file(Path(path).name), path))
    if not paths:
        return (
            f"{begin}It has not looked for a saved state at its start, so it would train all its steps again. New "
            f"nodes are let in when the round ends for another reason.{limit}"
        )
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    named = ", ".join(paths[:_MAX_NAMED]) + more
    return f"{begin}They are let in after the next save of a file that it has looked for at its start: {named}.{limit}"
