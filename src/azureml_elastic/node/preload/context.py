"""torch's context of worker processes, which redirects and prefixes their output, with workers from the warm process.

Where the warm process refuses, torch's own start is used, for all workers of the round.
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
    """What torch's ``SubprocessHandler`` is to its context, for a forked worker.

    Args:
        proc: the worker, the leader of a session and so of a process group.
        local_rank_id: of the worker.
    """

    def __init__(self, proc: ForkedWorker, local_rank_id: int) -> None:
        self.proc = proc
        self.local_rank_id = local_rank_id

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal, by default SIGTERM, to the worker's process group."""
        if self.proc.poll() is not None:
            return
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:
            self.proc.send_signal(death_sig or signal.SIGTERM)  # it was started just now and leads no group yet


class PreloadContext(SubprocessContext):
    """torch's context of worker processes, which come from the warm process where that can give them.

    Args:
        warm: the warm process.
        name: of the workers, as torch's other arguments.
        entrypoint: the executable.
        args: of the executable, by local rank.
        envs: additions to this process's environment, by local rank.
        logs_specs: where the output goes.
        log_line_prefixes: by local rank.
    """

    def __init__(
        self,
        warm: PreloadServer,
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
        self._warm = warm
        self.warm = False
        """Whether the workers came from the warm process."""

    def _start(self) -> None:
        start = time.monotonic()
        handlers: dict[int, ForkedHandler] = {}
        try:
            for local_rank in range(self.nprocs):
                handlers[local_rank] = ForkedHandler(self._fork(local_rank), local_rank)
        except ForkRefused as refusal:
            _LOG.info("This round's workers start cold: %s.", refusal)
            for handler in handlers.values():
                handler.close(signal.SIGKILL)
                handler.proc.wait()
            super()._start()  # type: ignore[no-untyped-call]
            return
        self.subprocess_handlers = handlers  # type: ignore[assignment] # all that torch uses of them
        self.warm = True
        _LOG.info("Started %d workers in %.0f ms from the warm process.", self.nprocs, (time.monotonic() - start) * 1e3)

    def _fork(self, local_rank: int) -> ForkedWorker:
        if (self.entrypoint, *self.args[local_rank]) != self._warm.command:
            raise ForkRefused("torch changes the arguments of each worker")
        environ = {**os.environ, **self.envs[local_rank]}
        return self._warm.start(environ, _path(self.stdouts[local_rank]), _path(self.stderrs[local_rank]))


def _path(name: str) -> Path | None:
    """Return torch's name of a log file as a path; it calls the console ``""``."""
    return Path(name) if name else None
