"""The opening of the session that a training stack's integration drives, one in a process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from wrapt import wrap_function_wrapper

from azureml_elastic.config import FixedGlobalBatch
from azureml_elastic.config import environment as variables
from azureml_elastic.distributed.process import WorkerEnvironment
from azureml_elastic.train.session.stack_session import StackSession
from azureml_elastic.train.session.start import has_run, open_run

__all__ = ["stack_session"]

_LOG = logging.getLogger(__name__)

_opened: list[StackSession | None] = []


def stack_session() -> StackSession | None:
    """Return the session of this process, opened by the first call; ``None`` where the process is no worker of a run.

    Raises:
        OSError: the node's agent does not answer.
    """
    if not _opened:
        _opened.append(_open())
    return _opened[0]


def _open() -> StackSession | None:
    if variables.CHANNEL not in os.environ or "RANK" not in os.environ or has_run():
        return None
    environment = WorkerEnvironment.read()
    batch = environment.plan.batch if environment.plan else FixedGlobalBatch()
    if not isinstance(batch, FixedGlobalBatch) or batch.reduce == "exact":
        _LOG.warning(
            "The script has no session, and its training stack cannot follow the batch policy %s: it trains without "
            'this library. Take FixedGlobalBatch() with reduce="allreduce", or open a session with train.start().',
            batch,
        )
        return None
    if not _group_is_whole(environment):
        return None
    session = StackSession(open_run(), batch.logical_workers or _largest_world_size(environment))
    wrap_function_wrapper(dist, "destroy_process_group", _finish_first)
    return session


def _group_is_whole(environment: WorkerEnvironment) -> bool:
    """Return whether the script has opened no process group, or that of all ranks, in which a session may train."""
    identity = environment.identity
    if not dist.is_initialized():
        return True
    if not environment.stays and (dist.get_rank(), dist.get_world_size()) == (identity.rank, identity.world_size):
        return True
    _LOG.warning(
        "The script has opened a process group of its own, with rank %d of %d where this process has rank %d of %d: it "
        "trains without this library. Leave torch.distributed.init_process_group() to the stack, or give it no rank or "
        "world size.",
        dist.get_rank(),
        dist.get_world_size(),
        identity.rank,
        identity.world_size,
    )
    return False


def _finish_first(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Finish the session before a script or a stack closes the process group, without which that is impossible."""
    session, caller = _opened[0], str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001
    if session is not None and caller.partition(".")[0] != "azureml_elastic":
        session.finish_before_end()
    return wrapped(*args, **kwargs)


def _largest_world_size(environment: WorkerEnvironment) -> int:
    """Return the number of ranks of a run with all nodes that the plan allows."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (environment.plan.resources.max_instance_count if environment.plan else 1) * per_node
