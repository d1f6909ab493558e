"""The last thing an agent does: it writes the state that it holds in memory to the storage, within a time limit."""

from __future__ import annotations

import logging
import os
import threading
import time

from azureml_elastic.checkpoint.snapshots.handed_over import write_handed_over
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.node.preemption.watcher import PreemptionWatcher

__all__ = ["keep_last_state"]

_LOG = logging.getLogger(__name__)

_LONGEST_SECONDS = 120.0
"""Time limit without a notice: a mount that hangs must not keep the node, and its bill, for ever."""

_POLL_SECONDS = 0.2


def keep_last_state(descriptor: int, state: HandedOverState, preemption: PreemptionWatcher) -> None:
    """Write the state to the run's storage, as no next worker of this node gets it. Never raises.

    What is cut short has no manifest, so it is never restored, and the next checkpoint removes it.

    Args:
        descriptor: descriptor of the state's memory, closed here.
        state: description of the state.
        preemption: watch for notices, whose deadline also counts if it comes meanwhile.
    """
    until = time.monotonic() + _LONGEST_SECONDS

    def seconds_left() -> float:
        return max(0.0, min(until - time.monotonic(), preemption.seconds_left))

    def write() -> None:
        try:
            where = write_handed_over(descriptor, state, seconds_left)
        except Exception as error:  # noqa: BLE001 - the agent ends for another reason, which must be seen
            _LOG.warning("The state of step %d in memory could not be kept: %s", state.step, error)
        else:
            _LOG.warning("The state of step %d in memory is kept in %s for the next start.", state.step, where)
        finally:
            os.close(descriptor)

    # A write to a mount that hangs cannot be ended: the thread ends with the process.
    writer = threading.Thread(target=write, name="last-state", daemon=True)
    writer.start()
    while writer.is_alive() and seconds_left() > 0.0:
        writer.join(_POLL_SECONDS)
    if writer.is_alive():
        _LOG.warning("The state of step %d in memory was not written in time, and is lost.", state.step)
