"""This node's worker processes: started, looked at and stopped; what they print goes to the console."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.forks.client import ForkedWorker, PreloadServer
from azureml_elastic.forks.optimizer_steps import ask_to_hold
from azureml_elastic.forks.process import ForkRefused
from azureml_elastic.forks.stack_imports import for_plain_start
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.worker_output import OutputCopier
from azureml_elastic.node.failures.classification import FailedWorker
from azureml_elastic.node.host.extension_locks import remove_stale_locks
from azureml_elastic.plurals import counted
from azureml_elastic.private_folder import make_private
from azureml_elastic.program.command import Program

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.01

_SESSION_STOP_SECONDS = 5.0
"""Longest time between SIGTERM and SIGKILL for workers with a session, which save before that and end at once unless
they hang."""

_IMPORT_SECONDS = 120.0
"""Time after the preload server's start for which workers wait for its imports."""


class Workers:
    """The processes of one round, or of several where they stay. For the agent's thread.

    Args:
        output: folder for their output, made if missing.
        preload_server: server that forks the workers; ``None`` starts each one as a new interpreter.
        handover_seconds: timeout for interrupted workers to put their state into memory.
        stop_seconds: seconds between SIGTERM and SIGKILL of workers without a session.
    """

    def __init__(
        self,
        program: Program,
        output: Path,
        channel: Channel,
        preload_server: PreloadServer | None,
        *,
        handover_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._program = program
        self._output = output
        self._channel = channel
        self._preload_server = preload_server
        self._handover = handover_seconds
        self._stop = stop_seconds
        self._folder: Path | None = None
        self._set: WorkerSet | None = None
        self._stopping: threading.Thread | None = None

    def start(self, environments: Mapping[int, Mapping[str, str]], prefixes: Mapping[int, str]) -> tuple[int, ...]:
        """Start them, once the ones before are gone, and return their process ids by local rank.

        Args:
            environments: additional environment variables of each local rank.
        """
        self.finish_stopping()
        environment = NodeEnvironment.read()  # with what the agent has set for all workers
        remove_stale_locks(environment)
        whole = {local_rank: environment.for_child(each) for local_rank, each in environments.items()}
        self._set = WorkerSet(self._program, self._round_folder(whole[0]), whole, prefixes)
        self._set.start(self.preload_server)
        return self.pids

    @property
    def preload_server(self) -> PreloadServer | None:
        """The preload server, once its imports are done; ``None`` where there is none that can fork."""
        server = self._preload_server
        if server is None:
            return None
        return server if server.wait_ready(max(0.0, server.since + _IMPORT_SECONDS - time.monotonic())) else None

    @property
    def is_preloaded(self) -> bool:
        """Whether a preload server makes the script's imports."""
        return self._preload_server is not None

    @property
    def ready(self) -> bool:
        """Whether new workers would start with the script's imports."""
        return self._preload_server is None or self._preload_server.ready

    @property
    def importing(self) -> bool:
        """Whether new workers would wait for the preload server, which has been started again."""
        return self._preload_server is not None and self._preload_server.importing

    @property
    def settled(self) -> bool:
        """Whether new workers would start as fast as they ever will."""
        return self._preload_server is None or self._preload_server.settled

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by local rank."""
        return self._set.pids if self._set is not None else ()

    @property
    def exit_codes(self) -> dict[int, int]:
        """Of those that have ended, by local rank; negative: the signal that ended it."""
        return self._set.exit_codes if self._set is not None else {}

    @property
    def alive(self) -> bool:
        """Whether there are workers and all of them run."""
        return self._set is not None and not self._set.exit_codes

    def failures(self) -> dict[int, FailedWorker]:
        """Return, by local rank, those that did not end well."""
        assert self._set is not None
        return self._set.failures()

    def begin_stopping(self, stop_seconds: float | None = None) -> None:
        """Stop them on a thread: this node can ask for its next place meanwhile.

        Args:
            stop_seconds: seconds between SIGTERM and SIGKILL of workers without a session; ``None`` for the usual ones.
        """
        self.finish_stopping()
        seconds = self._stop if stop_seconds is None else stop_seconds
        if self._channel.workers.in_session:
            seconds = min(seconds, _SESSION_STOP_SECONDS)
        self._channel.workers.release()  # a parked one may be the only one that has the newest step
        workers, self._set = self._set, None
        if workers is not None:
            self._stopping = threading.Thread(target=self._end, args=(workers, seconds), name="stop-workers")
            self._stopping.start()

    def finish_stopping(self) -> None:
        """Wait until all workers being stopped have ended."""
        if self._stopping is not None:
            self._stopping.join()
            self._stopping = None

    def _end(self, workers: WorkerSet, stop_seconds: float) -> None:
        """Let sessions hand over what they have, then end whatever is left."""
        until = time.monotonic() + self._handover
        while self._channel.workers.leaving and workers.running and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        # A session ignores SIGTERM, which it leaves to the agent, and exits at once when its connection ends.
        self._channel.workers.cut()
        workers.terminate()
        ask_to_hold(self._channel.folder, workers.pids, ask=False)  # those that wait in a step have got it by now
        workers.close(stop_seconds)

    def _round_folder(self, environ: Mapping[str, str]) -> Path:
        """Return the folder for the output of a round: named as under torchrun, and a new one for each agent."""
        if self._folder is None:
            make_private(self._output)
            run_id = quote(environ.get("TORCHELASTIC_RUN_ID", "run"), safe="")
            self._folder = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=self._output))
        return self._folder / f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class WorkerSet:
    """Worker processes that are started together, with their output in files and on the console.

    Each worker leads a session and a process group, to which signals are sent, so that they also reach the processes
    that it has started. The variable ``TORCHELASTIC_ERROR_FILE`` names the file to which the exception that ends a
    worker is written, see :mod:`~azureml_elastic.forks.uncaught_error`.

    Args:
        folder: folder for their output, emptied; each local rank has a folder in it.
        environments: complete environment of each local rank.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        environments: Mapping[int, Mapping[str, str]],
        prefixes: Mapping[int, str],
    ) -> None:
        self._program = program
        self._folder = folder
        self._environments = {
            local_rank: {**each, "TORCHELASTIC_ERROR_FILE": str(self._path(local_rank, "error.json"))}
            for local_rank, each in environments.items()
        }
        self._prefixes = prefixes
        self._processes: dict[int, ForkedWorker | subprocess.Popen[bytes]] = {}
        self._copier: OutputCopier | None = None
        self.forked = False
        """Whether the workers were forked by the preload server."""

    def start(self, server: PreloadServer | None) -> None:
        """Start the workers; where the preload server refuses one of them, all are started as new interpreters.

        Args:
            server: preload server that is ready; ``None`` for new interpreters.

        Raises:
            OSError: the interpreter cannot be started, or the output cannot be written.
        """
        # Workers that wait for their first place are started several times in the folder of round 0: an error file that
        # others have left would count as theirs.
        shutil.rmtree(self._folder, ignore_errors=True)
        for local_rank in self._environments:
            (self._folder / str(local_rank)).mkdir(parents=True)
        start = time.monotonic()
        if server is not None:
            try:
                for local_rank, environ in self._environments.items():
                    paths = self._path(local_rank, "stdout.log"), self._path(local_rank, "stderr.log")
                    self._processes[local_rank] = server.start(environ, *paths)
                self.forked = True
            except ForkRefused as refusal:
                _LOG.info("The workers of this round are started plainly: %s.", refusal)
                self._kill()
        if not self.forked:
            try:
                for local_rank, environ in self._environments.items():
                    self._processes[local_rank] = self._spawn(local_rank, environ)
            except OSError:
                self._kill()
                raise
        milliseconds = (time.monotonic() - start) * 1e3
        if self.forked:
            workers = counted(len(self._processes), "worker")
            _LOG.debug("Forked %s in %.0f ms from the preload server.", workers, milliseconds)
        self._copier = OutputCopier(
            [
                (self._path(local_rank, name), prefix, console)
                for local_rank, prefix in self._prefixes.items()
                for name, console in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr))
            ]
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by local rank."""
        return tuple(process.pid for _, process in sorted(self._processes.items()))

    @property
    def exit_codes(self) -> dict[int, int]:
        """Of those that have ended, by local rank; negative: the signal that ended it."""
        codes = {local_rank: process.poll() for local_rank, process in self._processes.items()}
        return {local_rank: code for local_rank, code in codes.items() if code is not None}

    @property
    def running(self) -> bool:
        """Whether any of them runs."""
        return len(self.exit_codes) < len(self._processes)

    def failures(self) -> dict[int, FailedWorker]:
        """Return, by local rank, those that did not end well."""
        return {
            local_rank: FailedWorker.read(
                code, self._path(local_rank, "error.json"), self._path(local_rank, "stderr.log")
            )
            for local_rank, code in self.exit_codes.items()
            if code
        }

    def terminate(self) -> None:
        """Send SIGTERM to the workers."""
        self._signal(signal.SIGTERM)

    def close(self, timeout: float) -> None:
        """Wait for the end of the workers, or kill them, and copy the rest of their output.

        Args:
            timeout: seconds until SIGKILL.
        """
        until = time.monotonic() + timeout
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()
        if self._copier is not None:
            self._copier.close()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    process.send_signal(number)  # just forked, not yet leader of a group

    def _spawn(self, local_rank: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = self._program.command_for(environ)
        with (
            self._path(local_rank, "stdout.log").open("wb") as stdout,
            self._path(local_rank, "stderr.log").open("wb") as stderr,
        ):
            return subprocess.Popen(
                command, env=for_plain_start(environ), stdout=stdout, stderr=stderr, start_new_session=True
            )

    def _path(self, local_rank: int, name: str) -> Path:
        return self._folder / str(local_rank) / name
