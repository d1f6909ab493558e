"""The opening of the session that a training stack's integration drives, one in a process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from wrapt import wrap_function_wrapper

from azureml_elastic.config import FixedGlobalBatch
from azureml_elastic.distributed.process import WorkerSettings
from azureml_elastic.environment.worker import WorkerEnvironment
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
    environment = WorkerEnvironment.read()
    if environment.channel is None or not environment.has_rank or has_run():
        return None
    settings = WorkerSettings.of(environment)
    batch = settings.plan.batch if settings.plan else FixedGlobalBatch()
    if not isinstance(batch, FixedGlobalBatch) or batch.reduce == "exact":
        _LOG.warning(
            "The script has no session, and its training stack cannot follow the batch policy %s: it trains without "
            'this library. Take FixedGlobalBatch() with reduce="allreduce", or open a session with train.start().',
            batch,
        )
        return None
    if not _group_is_whole(settings):
        return None
    session = StackSession(open_run(), batch.logical_workers or _largest_world_size(settings, environment))
    wrap_function_wrapper(dist, "destroy_process_group", _finish_first)
    return session


def _group_is_whole(settings: WorkerSettings) -> bool:
    """Return whether the script has opened no process group, or that of all ranks, in which a session may train."""
    identity = settings.identity
    if not dist.is_initialized():
        return True
    if not settings.stays and (dist.get_rank(), dist.get_world_size()) == (identity.rank, identity.world_size):
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


def _largest_world_size(settings: WorkerSettings, environment: WorkerEnvironment) -> int:
    """Return the number of ranks of a run with all nodes that the plan allows."""
    return (settings.plan.resources.max_instance_count if settings.plan else 1) * environment.local_world_size
