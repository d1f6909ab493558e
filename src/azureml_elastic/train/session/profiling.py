"""PyTorch's profiler over chosen steps of the run, on chosen ranks, in the format of TensorBoard and Perfetto.

A recording begins and ends between two steps. It is dropped if its round ends in the middle. A failure of the profiler
never ends training: it is logged once, and the profiler stays off.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

from azureml_elastic.config.profile import Profile, recorded_after
from azureml_elastic.distributed.device import device_of
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.ipc.worker_messages import Busy, Free

__all__ = ["Profiling"]

_LOG = logging.getLogger(__name__)

_SUFFIX = ".pt.trace.json.gz"
"""Suffix by which TensorBoard's plugin recognises its files; it takes the text before the time as the worker's name."""

_IDLE_SECONDS = 5.0
"""Time that a process which ends waits for its GPU, on which the kernels of a lost round may hang forever."""


class Profiling:
    """The recordings of one process; the name of the node is the beginning of the file names."""

    def __init__(self, wanted: Profile, folder: Path, node: str, device: torch.device, agent: Agent) -> None:
        self._wanted = wanted
        self._folder = folder
        self._node = re.sub(r"[^\w.-]", "_", node)
        self._device = device_of(device)
        self._agent = agent
        self._identity: WorkerIdentity | None = None
        self._entered = 0
        self._window: tuple[int, int] | None = None
        self._next = math.inf  # completed steps at which the profiler has to be started, stepped or stopped
        self._profiler: profile | None = None
        self._running = contextlib.ExitStack()
        self._last: int | None = None  # last step of the trace to write when the profiler stops, None to write none
        self._failed = False

    def between_steps(self, identity: WorkerIdentity, steps: int) -> None:
        """Start, step or stop the profiler if that is due after these steps; a new identity begins a round."""
        if identity is not self._identity:
            self._drop()
            self._identity, self._entered = identity, steps
            with self._safely():
                self._look_ahead(steps)
        elif steps >= self._next:
            with self._safely():
                self._advance(steps)

    def finish(self, steps: int) -> None:
        """Write the recorded steps of a recording that is not complete at the end of training."""
        self._next = math.inf
        if self._profiler is not None and self._window is not None and steps >= self._window[0]:
            with self._safely():
                self._stop(steps)
        self._drop()

    def close(self) -> None:
        """Release the profiler: an interpreter that ends while it runs crashes."""
        if self._profiler is None or self._device.drain(_IDLE_SECONDS):
            self._drop()

    def _look_ahead(self, steps: int) -> None:
        """Find the next recording of this rank, and begin it if it is due."""
        self._window, self._next = None, math.inf
        assert self._identity is not None
        if self._failed or (self._wanted.ranks != "all" and self._identity.rank not in self._wanted.ranks):
            return
        self._window = recorded_after(self._wanted, steps, self._entered)
        if self._window is not None:
            self._next = self._window[0] - 1 - self._wanted.warmup_steps
            if steps >= self._next:
                self._advance(steps)

    def _advance(self, steps: int) -> None:
        assert self._window is not None
        if self._profiler is None:
            self._start(steps + 1, *self._window)
            self._next = steps + 1
        elif steps < self._window[1]:
            self._profiler.step()
        else:
            self._stop(steps)
            self._look_ahead(steps)

    def _start(self, begin: int, first: int, last: int) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - it would be replaced
            raise RuntimeError("the script runs a profiler of its own")
        profiler = profile(
            activities=self._device.profiler_activities,
            schedule=lambda step: ProfilerAction.WARMUP if max(step, begin) < first else ProfilerAction.RECORD,
            on_trace_ready=self._write,
            record_shapes=self._wanted.record_shapes,
            profile_memory=self._wanted.profile_memory,
            with_stack=self._wanted.with_stack,
        )
        profiler.step_num = begin  # so that the trace has the run's own numbers
        with self._pause():
            self._running.enter_context(profiler)
        self._profiler = profiler
        _LOG.info("The profiler runs from step %d on and records steps %d to %d.", begin, first, last)

    def _stop(self, last: int) -> None:
        """Stop, and write the steps up to this one."""
        self._profiler, self._last = None, last
        with self._pause():
            self._running.close()

    def _drop(self) -> None:
        """Stop, and write nothing."""
        self._profiler, self._last = None, None
        with self._safely():
            self._running.close()

    def _write(self, profiler: profile) -> None:
        if self._last is None or self._window is None or self._identity is None:
            return
        worker = f"{self._node}_rank{self._identity.rank}_round{self._identity.round}"
        name = f"{worker}_steps{self._window[0]}-{self._last}"
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{name}.part.gz"  # a process may be killed while it writes
        profiler.export_chrome_trace(str(partial))
        whole = partial.replace(self._folder / f"{name}.{time.time_ns()}{_SUFFIX}")
        _LOG.info("The profile of steps %d to %d is %s.", self._window[0], self._last, whole)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._agent.report(Busy())
        try:
            yield
        finally:
            self._agent.report(Free())

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no error of the profiler may end training
            self._profiler, self._window, self._next = None, None, math.inf
            with contextlib.suppress(Exception):
                self._running.close()
            if not self._failed:
                _LOG.warning("The profiler has failed and stays off; training continues: %r", error)
            self._failed = True
