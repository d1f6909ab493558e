"""What the package asks of a device: the one place that knows which kind it is.

A CPU has completed its work when the call that begins it returns. A GPU runs *behind the host*: a call queues work and
returns, and the host learns later whether the work is complete. What matters for a lost peer is then

- how far the device has got (:meth:`Device.mark`, :meth:`Device.drain`),
- whether the collectives before that point are those of whole rounds (:meth:`Device.queued_collectives`,
  :meth:`Device.communicator_error`): a kernel of NCCL whose communicator is aborted ends and leaves garbage behind,
- that collectives can be ended at all (:meth:`Device.abort`).

Another kind of device is made known by :func:`register`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from typing_extensions import override

from azureml_elastic.environment.process import set_defaults
from azureml_elastic.environment.worker import WorkerEnvironment

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.001

_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
"""Variables of torch's ``ProcessGroupNCCL`` under which its threads leave a broken round to the session.

Read in ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`` (torch 2.13) when a group is made:

- ``ASYNC_ERROR_HANDLING``: with 3, torch's default, or torchrun's 1 the watchdog ends the process after an error of a
  communicator; with 1 or 2 it aborts the communicators by itself. With 0 it does neither, which
  ``_abort_process_group()`` asks for: the abort of the session, which sets its flag before, is then the only one.
- ``ENABLE_MONITORING``: a second thread ends the process where the watchdog has not moved for 8 minutes, such as in a
  call of CUDA that waits for a broken round. The node's agent detects a hang instead.
- ``RETHROW_CUDA_ERRORS``: the watchdog would end the process by an error of CUDA that it sees first; the training
  thread sees the same error, and ends with a message.
- ``WAIT_TIMEOUT_DUMP_MILSEC``: the watchdog sleeps four times as long after an error, in which others may write their
  flight recorders, and a process that stays has to wait for its end: a minute by torch's default.
"""


class Fetched:
    """A tensor of any shape in the memory of the host, once it has arrived: :meth:`arrived` is a mark of its device."""

    __slots__ = ("_value", "arrived")

    def __init__(self, value: torch.Tensor, arrived: Callable[[], bool]) -> None:
        self._value = value
        self.arrived = arrived

    def read(self) -> torch.Tensor:
        """Return the value, and wait for it if need be."""
        while not self.arrived():
            time.sleep(_POLL_SECONDS)
        return self._value


class Device:
    """A device whose work is complete when the call returns: the CPU.

    Attributes:
        torch: torch's name of the device
        backend: backend of its process groups
        runs_behind: whether work is queued, and completed after the call has returned
        separate: whether it has memory of its own, to which batches are copied
        may_stay: whether a process may take part in the next round after its collectives were aborted
    """

    backend = "gloo"
    runs_behind = False
    separate = False
    may_stay = True

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    @property
    def kind(self) -> str:
        """Torch's name of its kind, for a device mesh."""
        return self.torch.type

    @property
    def profiler_activities(self) -> list[ProfilerActivity]:
        """What PyTorch's profiler records."""
        return [ProfilerActivity.CPU]

    def keep_watchdog_out(self) -> None:
        """Set, before a group is made, that no thread of torch ends the process for a broken round."""

    def mark(self) -> Callable[[], bool]:
        """Return a function that tells whether the work is complete that the calling thread has queued up to now."""
        return lambda: True

    def synchronize(self) -> None:
        """Wait for the work that the calling thread has queued."""

    def drain(self, seconds: float) -> bool:  # noqa: ARG002 - nothing is queued here
        """Wait until all work is complete on all of its queues, or for so long; return whether it is."""
        return True

    def recording(self) -> bool:
        """Return whether calls are recorded to be replayed, so that nothing can be waited for."""
        return False

    def queued_collectives(self) -> tuple[int, ...]:
        """Return the number of collectives that this process has queued on the device in each of its groups."""
        return ()

    def communicator_error(self) -> str | None:
        """Return why collectives that have ended may not be complete, ``None`` if no reason is known."""
        return None

    def abort(self) -> None:
        """End the collectives of this device, and make all later ones fail. Callable from any thread."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to the target of its shape and type, within the device and as a part of its work."""
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Copy to a tensor of the host of the same shape; to pinned memory without waiting, see :meth:`synchronize`."""
        target.copy_(source, non_blocking=pinned)

    def copy_in(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host on this device."""
        return value

    def fetch(self, value: torch.Tensor) -> Fetched:
        """Return a copy of a small tensor on its way to the host."""
        return Fetched(value.detach().clone(), self.mark())

    def pin(self, memory: torch.Tensor) -> bool:  # noqa: ARG002 - no other device copies
        """Prepare memory of the host, uint8 (bytes,), for copies that do not wait; return whether it is."""
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo :meth:`pin`."""

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's own generator, uint8 (bytes,); ``None`` without one."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`random_state` returned."""


class CudaDevice(Device):
    """A GPU with NCCL.

    Its ``abort`` and ``drain`` are written after torch's sources and documentation; they have not run on hardware yet.
    """

    backend = "cpu:gloo,cuda:nccl"
    runs_behind = True
    separate = True

    @property
    def may_stay(self) -> bool:  # type: ignore[override]
        """Whether this was asked for: a second communicator after an abort has not been seen on hardware yet."""
        return WorkerEnvironment.read().in_process_on_gpu

    @property
    @override
    def profiler_activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    @override
    def keep_watchdog_out(self) -> None:
        set_defaults(_WATCHDOG)

    @override
    def mark(self) -> Callable[[], bool]:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # By now torch's collectives have made the current stream wait for theirs, so that the mark is behind them.
        event.record(torch.cuda.current_stream(self.torch))
        return lambda: bool(event.query())

    @override
    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch).synchronize()

    @override
    def drain(self, seconds: float) -> bool:
        failures: list[RuntimeError] = []

        def wait() -> None:
            try:
                torch.cuda.synchronize(self.torch)
            except RuntimeError as error:  # a kernel has failed: nothing on this device can be used any more
                failures.append(error)

        # Not on this thread: a kernel that neither the abort nor the driver ends would block it forever.
        return ends_within(seconds, wait) and not failures

    @override
    def recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @override
    def queued_collectives(self) -> tuple[int, ...]:
        return tuple(backend._get_sequence_number_for_group() for backend in self._backends())  # noqa: SLF001

    @override
    def communicator_error(self) -> str | None:
        for backend in self._backends():
            found = backend.get_error() if hasattr(backend, "get_error") else None
            if found is not None and found.name != "SUCCESS":
                return f"NCCL: the watchdog has found {found.name} in group {backend.name()}"
        return None

    @override
    def abort(self) -> None:
        backends = list(self._backends())
        if not backends:
            return
        # As one NCCL group: two communicators that are aborted one after the other may wait for each other (pytorch
        # issue 119797). The groups stay known to torch, unlike after its _abort_process_group(): another collective of
        # the script then fails with an error of NCCL, which is a lost peer's, and not with "not initialized".
        with contextlib.suppress(RuntimeError, ValueError):
            backends[0]._group_start()  # noqa: SLF001
            for backend in backends:
                backend.abort()
            backends[0]._group_end()  # noqa: SLF001

    @override
    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for kind in {each.dtype for each in targets}:  # one kernel for each type
                pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == kind]
                torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    @override
    def copy_in(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.torch, non_blocking=True)

    @override
    def fetch(self, value: torch.Tensor) -> Fetched:
        with torch.cuda.device(self.torch):
            # Pinned: a copy to other memory would wait for all that the device has to do before it.
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            host.copy_(value.detach(), non_blocking=True)
            return Fetched(host, self.mark())

    @override
    def pin(self, memory: torch.Tensor) -> bool:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code) != 0:
            _LOG.warning("Memory for checkpoints cannot be pinned (CUDA error %s): copies take longer.", code)
        return int(code) == 0

    @override
    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    @override
    def random_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.torch)

    @override
    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch)

    def _backends(self) -> Iterable[Any]:
        """Return the NCCL backends of all groups, also of those that the script has made."""
        if not dist.is_initialized():
            return []
        found = []
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001
            with contextlib.suppress(RuntimeError):  # a group for the CPU alone
                backend: Any = group._get_backend(self.torch)  # noqa: SLF001
                if backend.name() == "nccl":  # a group of gloo serves GPUs as well, and waits on the host
                    found.append(getattr(backend, "wrapped_pg", backend))  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        return found


_registered: dict[str, Device] = {}


def register(kind: str, device: Device) -> None:
    """Have devices of a kind that torch names, such as ``"cpu"``, be treated in another way from now on."""
    _registered[kind] = device


def device_of(device: torch.device) -> Device:
    """Return what the package may ask of a device of torch."""
    if device.type in _registered:
        return _registered[device.type]
    return CudaDevice(device) if device.type == "cuda" else Device(device)


def ends_within(seconds: float, action: Callable[[], None]) -> bool:
    """Run an action that may hang on a thread of its own, and return whether it has ended in time."""
    # A daemon: one that hangs for good must not keep the interpreter from its end.
    thread = threading.Thread(target=action, name="may-hang", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
