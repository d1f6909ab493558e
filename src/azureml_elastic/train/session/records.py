"""What a process records of its steps beside training: their samples, the values that the script logs, and profiles."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, profile

from azureml_elastic.config.policies import Profile, recorded_after
from azureml_elastic.distributed.device import Fetched, device_of
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.ipc.worker_messages import Busy, Free, Logged
from azureml_elastic.ledger.line_file import LineFile
from azureml_elastic.ledger.metric_names import MOST_VALUES, name_problem
from azureml_elastic.train.data.position import LoaderState, Window
from azureml_elastic.train.data.sampling import Cursor

_LOG = logging.getLogger(__name__)

_SUFFIX = ".pt.trace.json.gz"
"""Suffix by which TensorBoard's plugin recognises its files; it takes the text before the time as the worker's name."""

_IDLE_SECONDS = 5.0
"""Time that a process which ends waits for its GPU, on which the kernels of a lost round may hang forever."""


class Audit:
    """A record of the samples of each step, from which "exactly once" can be proven afterwards.

    JSON lines are appended to ``samples/round-<round>.rank-<rank>.jsonl``.

    A rank records the samples of a step before it takes part in it, and its completion afterwards. A rank that dies in
    between may have contributed its gradients: the step counts if any other rank has completed it.

    Args:
        run_dir: folder of the run, ``None`` to record nothing
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._folder = None if run_dir is None else run_dir / "samples"
        self._file: LineFile | None = None
        self._round = 0

    def enter(self, identity: WorkerIdentity) -> None:
        """Continue with the file of a round."""
        self.close()
        self._round = identity.round
        if self._folder is not None:
            name = f"round-{identity.round}.rank-{identity.rank}.jsonl"
            self._file = LineFile(self._folder / name, "lines of samples")

    def begin(self, step: int, loader: LoaderState, window: Window) -> None:
        """Record this rank's samples of a step that is about to be trained."""
        if self._file is not None:  # else the ids need not be listed
            self._write(step, loader=loader.name, epoch=window.after.epoch, of=window.epoch_size, ids=list(window.ids))

    def ended(self, step: int, loader: LoaderState, cursor: Cursor) -> None:
        """Record the number of samples of an epoch, which was unknown before its end."""
        self._write(step, loader=loader.name, epoch=cursor.epoch, of=cursor.consumed, ids=[])

    def done(self, step: int) -> None:
        """Record that a step is completed."""
        self._write(step, done=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int, **fields: Any) -> None:
        if self._file is not None:
            self._file.append(json.dumps({"round": self._round, "step": step, **fields}))


class LoggedValues:
    """Values that the script logs, of the step in progress and of committed steps that were not sent yet.

    A value of a tensor on a GPU is copied to the host by the device's queue, and read when the copy is there, so that
    logging makes the training loop wait for no kernel. Values of the step in progress are sent when it is committed,
    those of a committed step at once, both when their copies have arrived, in the order of the steps.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._in_progress: dict[str, float | Fetched] = {}
        self._committed: deque[tuple[int, dict[str, float | Fetched]]] = deque()
        self._names: set[object] = set()

    def add(self, values: Mapping[str, Any], step: int | None) -> None:
        """Add values of the step in progress, or send those of a completed step.

        Args:
            values: numbers by name
            step: completed step to which they belong, ``None`` for the step in progress

        Raises:
            UsageError: there are too many values, a name is not allowed, or a value is no number.
        """
        if not isinstance(values, Mapping):
            raise UsageError(
                f"run.log() takes values by name, as in run.log({{'loss': loss}}), not {type(values).__name__}."
            )
        if len(values) > MOST_VALUES:
            raise UsageError(
                f"run.log() was called with {len(values)} values; the limit is {MOST_VALUES}. Log a summary of them, "
                "or divide them among several calls."
            )
        for name in values:
            if name not in self._names:
                if problem := name_problem(name):
                    raise UsageError(f"run.log(): the name {name!r} {problem}.")
                self._names.add(name)
        read = {name: _number(name, value) for name, value in values.items()}
        if step is None:
            self._in_progress.update(read)
        else:
            self._committed.append((step, read))
            self.send(wait=False)

    def commit(self, step: int) -> None:
        """Assign the values of the step in progress to this step, and send all values that have arrived."""
        if self._in_progress:
            self._committed.append((step, self._in_progress))
            self._in_progress = {}
        self.send(wait=False)

    def drop(self) -> None:
        """Drop the values of the step in progress, which is not going to be committed."""
        self._in_progress = {}

    def send(self, *, wait: bool) -> None:
        """Send the values of committed steps.

        Args:
            wait: whether to wait for those that are still on a device
        """
        while self._committed:
            step, values = self._committed[0]
            if not wait and not all(value.arrived() for value in values.values() if isinstance(value, Fetched)):
                return  # and so do all behind it: the agent gets the steps in their order
            self._committed.popleft()
            numbers = (
                (name, value if isinstance(value, float) else float(value.read().item()))
                for name, value in values.items()
            )
            while part := dict(islice(numbers, MOST_VALUES)):
                self._agent.report(Logged(step, part))


def _number(name: str, value: Any) -> float | Fetched:
    """Return a value as a number, or, of a tensor of one element, as a copy that becomes one.

    Raises:
        UsageError: the value is no number.
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"run.log(): {name!r} is a {value.dtype} tensor of the shape {tuple(value.shape)}; give one real "
                "number, such as value.mean()."
            )
        value = value.detach()
        return device_of(value.device).fetch(value)
    try:
        if isinstance(value, str | bytes):
            raise TypeError  # noqa: TRY301 - float() would read a text
        return float(value.item() if getattr(value, "size", 0) == 1 else value)  # an array of NumPy's
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"run.log(): {name!r} is {_shown(value)} of the type {type(value).__name__}; give one real number: a "
            "float, an int, or a tensor or an array of one element."
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - a line of the message


class Profiling:
    """PyTorch's profiler over chosen steps of the run, on chosen ranks, in the format of TensorBoard and Perfetto.

    A recording begins and ends between two steps. It is dropped if its round ends in the middle. A failure of the
    profiler never ends training: it is logged once, and the profiler stays off. The name of the node is the beginning
    of the file names.
    """

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
        if identity is not self._identity:  # each round has an object of its own
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
        # Renamed once it is whole: a process may be killed while it writes, and TensorBoard reads what it finds.
        partial = self._folder / f"{name}.part.gz"
        profiler.export_chrome_trace(str(partial))
        whole = partial.replace(self._folder / f"{name}.{time.time_ns()}{_SUFFIX}")
        _LOG.info("The profile of steps %d to %d is %s.", self._window[0], self._last, whole)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._agent.report(Busy())  # to start the profiler, or to write a trace, may take as long as many steps
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
