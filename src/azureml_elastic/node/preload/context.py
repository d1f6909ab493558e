"""torch's multiprocessing context, which redirects and prefixes output, with workers forked by the preload server.

If the preload server refuses, torch's own start is used for all workers of the round.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs, SubprocessContext

from azureml_elastic.node.preload.client import ForkedWorker, ForkRefused, PreloadServer

__all__ = ["ForkedHandler", "PreloadContext"]

_LOG = logging.getLogger(__name__)


class ForkedHandler:
    """Counterpart of torch's ``SubprocessHandler`` for a forked worker.

    Args:
        proc: worker, the leader of a session and of a process group.
        local_rank_id: local rank of the worker.
    """

    def __init__(self, proc: ForkedWorker, local_rank_id: int) -> None:
        self.proc = proc
        self.local_rank_id = local_rank_id

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal, by default SIGTERM, to the process group of the worker."""
        if self.proc.poll() is not None:
            return
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:
            self.proc.send_signal(death_sig or signal.SIGTERM)  # just forked, not yet leader of a group


class PreloadContext(SubprocessContext):
    """torch's context of worker processes, forked by the preload server if possible.

    Args:
        server: preload server.
        name: name of the workers; this and the following as in torch.
        entrypoint: executable.
        args: arguments of the executable by local rank.
        envs: additions to this process's environment by local rank.
        logs_specs: destinations of the output.
        log_line_prefixes: prefixes of output lines by local rank.
    """

    def __init__(
        self,
        server: PreloadServer,
        *,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[str, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None,
    ) -> None:
        super().__init__(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
        )
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
            super()._start()  # type: ignore[no-untyped-call]
            return
        self.subprocess_handlers = handlers  # type: ignore[assignment] # all that torch uses of them
        self.forked = True
        _LOG.info(
            "Forked %d workers in %.0f ms from the preload server.", self.nprocs, (time.monotonic() - start) * 1e3
        )

    def _fork(self, local_rank: int) -> ForkedWorker:
        if (self.entrypoint, *self.args[local_rank]) != self._server.command:
            raise ForkRefused("torch changes the arguments of each worker")
        environ = {**os.environ, **self.envs[local_rank]}
        return self._server.start(environ, _path(self.stdouts[local_rank]), _path(self.stderrs[local_rank]))


def _path(name: str) -> Path | None:
    """Return the path of a log file; torch denotes the console by ``""``."""
    return Path(name) if name else None
