"""A device that runs behind the host, as a GPU does, without hardware.

Work is queued and done in order on a thread. A collective is gloo's, so there are really several ranks; like a kernel
of NCCL it does not end when a peer dies, but when it is aborted, and then it leaves garbage behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from azureml_elastic.distributed.device import Device, Fetched

GARBAGE = 1e30
"""What an aborted collective leaves in its tensor."""


_POLL_S = 0.0005


class Ended(Exception):
    """The device does nothing any more."""


class DeferredDevice(Device):
    """The device, and the thread that does its work.

    Args:
        operation_s: seconds that each operation takes.
        may_stay: whether the process may get new communicators after an abort.
    """

    runs_behind = True

    def __init__(self, *, operation_s: float = 0.0, may_stay: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.may_stay = may_stay
        self._operation_s = operation_s
        self._changed = threading.Condition()
        self._operations: list[Callable[[], Any]] = []
        self._done = 0
        self._collectives = 0
        self.aborted = threading.Event()
        self._thread = threading.Thread(target=self._work, name="deferred-device", daemon=True)
        self._thread.start()

    def queue(self, operation: Callable[[], Any]) -> None:
        """Have an operation done after all that were queued before."""
        with self._changed:
            self._operations.append(operation)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after what is queued, and collectives at once."""
        self.abort()
        self.queue(_end)
        self._thread.join()

    def reduce(self, tensor: torch.Tensor, group: Any = None, divisor: int = 1) -> None:
        """Queue an all-reduce in place."""
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")  # as a collective that is queued too late
        self._collectives += 1
        self.queue(partial(self._reduce, tensor, group, divisor))

    def begins(self, number: int) -> None:
        """Do something on the device's thread before an operation."""

    def waits(self) -> None:
        """Do something on the device's thread now and then while a collective waits for peers, or for its abort."""

    def keep_watchdog_out(self) -> None:
        """Begin with new communicators: this is called before groups are made."""
        self.aborted.clear()
        self._collectives = 0

    def mark(self) -> Callable[[], bool]:
        return partial(self.reached, len(self._operations))

    def synchronize(self) -> None:
        self._wait(None)

    def drain(self, seconds: float) -> bool:
        return self._wait(seconds)

    def queued_collectives(self) -> tuple[int, ...]:
        return (self._collectives,)

    def abort(self) -> None:
        self.aborted.set()

    def copy(self, targets, sources):
        self.queue(partial(super().copy, targets, sources))

    def copy_out(self, target, source, *, pinned):
        self.queue(partial(super().copy_out, target, source, pinned=pinned))

    def fetch(self, value):
        host = torch.empty_like(value)
        self.queue(partial(super().copy, [host], [value.detach()]))
        return Fetched(host, self.mark())

    def reached(self, number: int) -> bool:
        """Return whether so many operations are done."""
        return self._done >= number

    def _wait(self, seconds: float | None) -> bool:
        with self._changed:
            number = len(self._operations)
            return self._changed.wait_for(lambda: self._done >= number, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done < len(self._operations))
                operation = self._operations[self._done]
                self._operations[self._done] = lambda: None  # it holds tensors
            try:
                self.begins(self._done)
                if self._operation_s:
                    time.sleep(self._operation_s)
                operation()
            except Ended:
                return
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _reduce(self, tensor: torch.Tensor, group: Any, divisor: int) -> None:
        value = tensor.clone()
        if not self._reduced(value, group or dist.group.WORLD):
            while not self.aborted.wait(_POLL_S):
                self.waits()
            value = torch.full_like(value, GARBAGE)  # gloo may still use the other one
        tensor.copy_(value / divisor)

    def _reduced(self, tensor: torch.Tensor, group: Any) -> bool:
        """Return whether a collective has ended well; one whose connections are closed may not end at all."""
        try:
            work = None if self.aborted.is_set() else group.allreduce([tensor])
            while work is not None and not work.is_completed():
                if self.aborted.wait(_POLL_S):
                    return False
                self.waits()
            return work is not None and work.wait()
        except RuntimeError:
            return False


class DeferredSGD(Optimizer):
    """Gradient descent with momentum, whose update is queued."""

    def __init__(self, parameters, device: DeferredDevice, lr: float, momentum: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self._device = device

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                    update = partial(_update, parameter, parameter.grad, velocity, group["lr"], group["momentum"])
                    self._device.queue(update)


def _end() -> None:
    raise Ended


def _update(parameter, gradient, velocity, lr, momentum):
    with torch.no_grad():
        velocity.mul_(momentum).add_(gradient)
        parameter.sub_(lr * velocity)


def reduce_later(device, bucket):
    """Average gradients of ``DistributedDataParallel`` on the device: a hook for ``register_comm_hook()``.

    The result is there for the host at once, and for the device when it gets there, as that of NCCL.
    """
    device.reduce(bucket.buffer(), divisor=dist.get_world_size())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
