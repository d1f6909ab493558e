"""Adoption of a checkpoint that an agent made, when it ended, of a state that it held in memory."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from azureml_elastic.checkpoint.format.catalogue import handed_over, verify
from azureml_elastic.checkpoint.format.manifest import COMMITTED
from azureml_elastic.checkpoint.save.background_save import LONG_RETRY_SECONDS, TaskOutcome, retry_while_unavailable
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointError, Fenced
from azureml_elastic.ipc.agent_interface import Agent

__all__ = ["adopt_handed_over"]

_LOG = logging.getLogger(__name__)


def adopt_handed_over(
    storage: Storage, control: ControlGroup, agent: Agent, committed: Reference | None
) -> Reference | None:
    """Commit the whole handed-over checkpoint of the highest step, if it is beyond the committed one. A collective.

    It was written without the table, which may have been away; what commits it now is fenced like any other commit.

    Returns:
        The reference to it, ``None`` where there is none.

    Raises:
        CheckpointError: it could not be committed.
        Fenced: a newer round has taken over.
    """
    after = -1 if committed is None else committed.step
    found: Any = control.from_main(_adopt(storage, agent, after) if control.rank == 0 else None)
    if isinstance(found, TaskOutcome):
        if found.kind == "fenced":
            raise Fenced(f"Training does not start: {found.text}")
        raise CheckpointError(f"A state that an agent kept in {storage} could not be committed: {found.text}")
    adopted: Reference | None = found
    return adopted


def _adopt(storage: Storage, agent: Agent, step: int) -> Reference | TaskOutcome | None:
    try:
        # Before the commit: a damaged one would hide the committed checkpoint that is not its parent.
        manifest = next((each for each in handed_over(storage, step) if not verify(storage, each)), None)
    except OSError as error:
        _LOG.warning("No state of an agent that has ended is looked for in %s: %s", storage, error)
        return None
    if manifest is None:
        return None
    reference = manifest.reference
    failure = retry_while_unavailable(lambda: agent.commit(reference, 0.0), LONG_RETRY_SECONDS)
    if failure is not None:
        return failure
    with contextlib.suppress(OSError):
        storage.write(reference.directory, COMMITTED, [])
    _LOG.warning(
        "The state of step %d, which an agent held in memory when it ended, is committed as %s.",
        reference.step,
        reference.directory,
    )
    return reference
