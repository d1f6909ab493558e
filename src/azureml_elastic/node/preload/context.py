"""torch's multiprocessing context, which redirects and prefixes output, with workers forked by the preload server."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SubprocessContext

from azureml_elastic.node.preload.client import ForkedWorker, ForkRefused, PreloadServer
from azureml_elastic.node.preload.stack_imports import for_plain_start

__all__ = ["ForkedHandler", "PreloadContext", "plain_environments"]

_LOG = logging.getLogger(__name__)


def plain_environments(environments: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, str]]:
    """Return the additional environment variables of workers that are not forked, by local rank."""
    return {local_rank: for_plain_start({**os.environ, **each}) for local_rank, each in environments.items()}


@dataclass(frozen=True)
class ForkedHandler:
    """Counterpart of torch's ``SubprocessHandler`` for a forked worker.

    Args:
        proc: worker, the leader of a session and of a process group.
        local_rank_id: local rank of the worker.
    """

    proc: ForkedWorker
    local_rank_id: int

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal, by default SIGTERM, to the process group of the worker."""
        if self.proc.poll() is not None:
            return
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:
            self.proc.send_signal(death_sig or signal.SIGTERM)  # just forked, not yet leader of a group


class PreloadContext(SubprocessContext):
    """torch's context of worker processes, forked by the preload server.

    If the preload server refuses, torch's own start is used for all workers of the round.

    Args:
        server: preload server.
        arguments: arguments of torch's ``SubprocessContext``.
    """

    def __init__(self, server: PreloadServer, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._server = server
        self.forked = False
        """Whether the workers were forked by the preload server."""

    def _start(self) -> None:
        start = time.monotonic()
        handlers: dict[int, ForkedHandler] = {}
        try:
            for local_rank in range(self.nprocs):
                handlers[local_rank] = ForkedHandler(self._fork(local_rank), local_rank)
        except ForkRefused as refusal:
            _LOG.info("The workers of this round are started plainly: %s.", refusal)
            for handler in handlers.values():
                handler.close(signal.SIGKILL)
                handler.proc.wait()
            self.envs = plain_environments(self.envs)
            super()._start()  # type: ignore[no-untyped-call]
            return
        self.subprocess_handlers = handlers  # type: ignore[assignment] # all that torch uses of them
        self.forked = True
        milliseconds = (time.monotonic() - start) * 1e3
        _LOG.info("Forked %d workers in %.0f ms from the preload server.", self.nprocs, milliseconds)

    def _fork(self, local_rank: int) -> ForkedWorker:
        environ = {**os.environ, **self.envs[local_rank]}
        if (self.entrypoint, *self.args[local_rank]) != self._server.program.command_for(environ):
            raise ForkRefused("torch changes the arguments of each worker")
        # torch denotes the console by an empty file name.
        stdout, stderr = (
            Path(names[local_rank]) if names[local_rank] else None for names in (self.stdouts, self.stderrs)
        )
        return self._server.start(environ, stdout, stderr)
