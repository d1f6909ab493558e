"""This node's worker processes: started, looked at and stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SubprocessContext

from azureml_elastic.config.command.program import Program
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.host.extension_locks import remove_stale_locks
from azureml_elastic.node.preload.client import PreloadServer
from azureml_elastic.node.preload.context import PreloadContext, plain_environments

__all__ = ["Workers"]

_POLL_SECONDS = 0.01

_IMPORT_SECONDS = 120.0
"""Time after the node's start for which its first workers wait for the preload server's imports."""


class Workers:
    """The processes of one round, or of several where they stay. For the agent's thread.

    Args:
        program: program of the workers.
        logs: where their output goes.
        channel: server for their sessions.
        preload_server: server that forks the workers; ``None`` starts each one as a new interpreter.
        handover_seconds: timeout for interrupted workers to put their state into memory.
        stop_seconds: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        program: Program,
        logs: LogsSpecs,
        channel: Channel,
        preload_server: PreloadServer | None,
        *,
        handover_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._program = program
        self._logs = logs
        self._channel = channel
        self._preload_server = preload_server
        self._handover = handover_seconds
        self._stop = stop_seconds
        self._imports_until = time.monotonic() + _IMPORT_SECONDS
        self._context: SubprocessContext | None = None
        self._stopping: threading.Thread | None = None

    def start(self, environments: Mapping[int, Mapping[str, str]], prefixes: Mapping[int, str]) -> tuple[int, ...]:
        """Start them, once the ones before are gone, and return their process ids by local rank.

        Args:
            environments: additional environment variables of each local rank.
            prefixes: prefix of each output line, by local rank.
        """
        self.finish_stopping()
        commands = {rank: self._program.command_for({**os.environ, **each}) for rank, each in environments.items()}
        remove_stale_locks()
        arguments: dict[str, Any] = {
            "name": "worker",
            "entrypoint": self._program.command[0],
            "args": {local_rank: command[1:] for local_rank, command in commands.items()},
            "envs": {local_rank: dict(each) for local_rank, each in environments.items()},
            "logs_specs": self._logs,
            "log_line_prefixes": dict(prefixes),
        }
        left = max(0.0, self._imports_until - time.monotonic())
        if self._preload_server is not None and self._preload_server.wait_ready(left):
            self._context = PreloadContext(self._preload_server, **arguments)
        else:
            self._context = SubprocessContext(**{**arguments, "envs": plain_environments(environments)})
        self._context.start()
        return self.pids

    @property
    def ready(self) -> bool:
        """Whether new workers would start with the script's imports."""
        return self._preload_server is None or self._preload_server.ready

    @property
    def settled(self) -> bool:
        """Whether new workers would start as fast as they ever will."""
        return self._preload_server is None or self._preload_server.settled

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by local rank."""
        if self._context is None:
            return ()
        return tuple(pid for _, pid in sorted(self._context.pids().items()))

    @property
    def stderrs(self) -> Mapping[int, str]:
        """The file of each worker's standard error, by local rank."""
        return self._context.stderrs if self._context is not None else {}

    @property
    def exit_codes(self) -> dict[int, int]:
        """Of those that have ended, by local rank; negative: the signal that ended it."""
        codes = {local_rank: handler.proc.poll() for local_rank, handler in self._handlers().items()}
        return {local_rank: code for local_rank, code in codes.items() if code is not None}

    @property
    def alive(self) -> bool:
        """Whether there are workers and all of them run."""
        handlers = self._handlers()
        return bool(handlers) and all(handler.proc.poll() is None for handler in handlers.values())

    def failures(self) -> dict[int, ProcessFailure]:
        """Return, by local rank, those that did not end well."""
        context = self._context
        assert context is not None
        return {
            local_rank: ProcessFailure(
                local_rank=local_rank,
                pid=context.pids()[local_rank],
                exitcode=code,
                error_file=context.error_files[local_rank],
            )
            for local_rank, code in self.exit_codes.items()
            if code != 0
        }

    def wait_for_siblings(self) -> None:
        """Let the workers beside one that has failed hand their state over, and end by themselves."""
        self._channel.workers.interrupt()
        until = time.monotonic() + self._handover
        while self._channel.workers.leaving and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def begin_stopping(self) -> None:
        """Stop them on a thread: this node can ask for its next place meanwhile."""
        self.finish_stopping()
        self._channel.workers.interrupt()
        context, self._context = self._context, None
        if context is not None:
            self._stopping = threading.Thread(target=self._end, args=(context,), name="stop-workers")
            self._stopping.start()

    def finish_stopping(self) -> None:
        """Wait until all workers being stopped have ended."""
        if self._stopping is not None:
            self._stopping.join()
            self._stopping = None

    def _end(self, context: SubprocessContext) -> None:
        """Let sessions hand over what they have, then end whatever is left."""
        until = time.monotonic() + self._handover
        while self._channel.workers.leaving and _running(context) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        self._channel.workers.cut()
        context.close(signal.SIGTERM, timeout=round(self._stop))

    def _handlers(self) -> Mapping[int, Any]:
        return getattr(self._context, "subprocess_handlers", {})


def _running(context: SubprocessContext) -> bool:
    handlers: Mapping[int, Any] = getattr(context, "subprocess_handlers", {})
    return any(handler.proc.poll() is None for handler in handlers.values())
