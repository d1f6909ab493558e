"""torch's local agent, with workers that start from the warm process.

torch builds the workers' environment and log files in ``LocalElasticAgent._start_workers`` and hands both to a
``SubprocessContext``, which starts processes. The place where torch lets others look at the environment on its way is
``LogsSpecs.reify(envs)``: there a warm start leaves torch's function, with everything that it has prepared, and goes on
with a context of its own. A cold start goes through unchanged.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.utils.api import macros

from azureml_elastic.node.warm.process import WarmProcess, WarmRefused, WarmWorker

__all__ = ["WarmAgent", "WarmContext", "WarmHandler"]

_LOG = logging.getLogger(__name__)

_PATIENCE_SECONDS = 120.0
"""How long imports may take before workers start without them. A cold worker would not be faster."""

_UNUSUAL = ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
"""Options of newer releases of torch that only its own start knows how to follow."""


class WarmHandler:
    """What torch's ``SubprocessHandler`` is to its context, for a forked worker.

    Args:
        proc: the worker, the leader of a session and so of a process group.
        local_rank_id: of the worker.
    """

    def __init__(self, proc: WarmWorker, local_rank_id: int) -> None:
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


class WarmContext(SubprocessContext):
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
        warm: WarmProcess,
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
        handlers: dict[int, WarmHandler] = {}
        try:
            for local_rank in range(self.nprocs):
                handlers[local_rank] = WarmHandler(self._fork(local_rank), local_rank)
        except WarmRefused as refusal:
            _LOG.info("This round's workers start cold: %s.", refusal)
            for handler in handlers.values():
                handler.close(signal.SIGKILL)
                handler.proc.wait()
            super()._start()  # type: ignore[no-untyped-call]
            return
        self.subprocess_handlers = handlers  # type: ignore[assignment] # all that torch uses of them
        self.warm = True
        _LOG.info("Started %d workers in %.0f ms from the warm process.", self.nprocs, (time.monotonic() - start) * 1e3)

    def _fork(self, local_rank: int) -> WarmWorker:
        if (self.entrypoint, *self.args[local_rank]) != self._warm.command:
            raise WarmRefused("torch changes the arguments of each worker")
        environ = {**os.environ, **self.envs[local_rank]}
        return self._warm.start(environ, _path(self.stdouts[local_rank]), _path(self.stderrs[local_rank]))


class WarmAgent(LocalElasticAgent):
    """torch's local agent with a warm process.

    Args:
        spec: of the workers; its entrypoint and arguments are the warm process's :attr:`WarmProcess.command`.
        logs_specs: where their output goes.
        log_line_prefix_template: as torch's.

    Attributes:
        warm: the warm process; ``None`` starts all workers as torch does.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, log_line_prefix_template: str | None = None) -> None:
        self._exit = _Exit(logs_specs)
        super().__init__(spec, self._exit, log_line_prefix_template=log_line_prefix_template)
        self._prefix_template = log_line_prefix_template
        self.warm: WarmProcess | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        warm, spec = self.warm, worker_group.spec
        usual = isinstance(spec.entrypoint, str) and not any(getattr(spec, name, None) for name in _UNUSUAL)
        if warm is None or not usual or not warm.wait_ready(_PATIENCE_SECONDS):
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        self._exit.open = True
        try:
            super()._start_workers(worker_group)
        except _Prepared as prepared:
            context = self._context(warm, spec, prepared)
        finally:
            self._exit.open = False
        self._pcontext = context
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context.pids()

    def _context(self, warm: WarmProcess, spec: WorkerSpec, prepared: _Prepared) -> WarmContext:
        assert isinstance(spec.entrypoint, str)
        prefixes = None
        if self._prefix_template:
            template = Template(self._prefix_template)
            prefixes = {
                local_rank: template.safe_substitute(role_name=spec.role, rank=env["RANK"], local_rank=local_rank)
                for local_rank, env in prepared.envs.items()
            }
        return WarmContext(
            warm,
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in prepared.envs},
            envs=prepared.envs,
            logs_specs=_Reified(prepared.destination),
            log_line_prefixes=prefixes,
        )


class _Prepared(Exception):
    """torch has prepared a start of workers.

    Args:
        envs: by local rank.
        destination: of the output.
    """

    def __init__(self, envs: dict[int, dict[str, str]], destination: LogsDest) -> None:
        super().__init__("torch was to be stopped here")
        self.envs = envs
        self.destination = destination


class _Exit(LogsSpecs):
    """Someone else's specification of logs, from which torch's start can be left."""

    def __init__(self, inner: LogsSpecs) -> None:
        super().__init__()
        self._inner = inner
        self.open = False

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = self._inner.reify(envs)
        if self.open:
            raise _Prepared(envs, destination)
        return destination

    @property
    def root_log_dir(self) -> str:
        return self._inner.root_log_dir


class _Reified(LogsSpecs):
    """A specification of logs whose files are already known."""

    def __init__(self, destination: LogsDest) -> None:
        super().__init__()
        self._destination = destination

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:  # noqa: ARG002 - they are in it
        return self._destination

    @property
    def root_log_dir(self) -> str:
        return ""


def _path(name: str) -> Path | None:
    """Return torch's name of a log file as a path; it calls the console ``""``."""
    return Path(name) if name else None
