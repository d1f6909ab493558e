"""Real processes that train together, forked from a server that has imported torch once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ("torch.distributed", "azureml_elastic.train", "torch._dynamo")
CONTEXT.set_forkserver_preload(list(_PRELOADED))
TIMEOUT_S = 60.0


@dataclass
class Outcome:
    """How a process ended: its exit code, and what the function returned or the traceback."""

    code: int | None
    value: Any
    error: str | None


def preload(*modules: str) -> None:
    """Have the server import these modules, too, before it forks the first process; only installed ones."""
    CONTEXT.set_forkserver_preload([*_PRELOADED, *modules])


def _child(pipe, environment, function, args):
    os.setsid()  # as torchrun has it; what it starts ends with it
    for name in [name for name in os.environ if name.startswith("AZUREML_ELASTIC_")]:
        del os.environ[name]
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # it may have processes that load data
    # These are started as everywhere: the fork server has set itself as the way, and each would import torch anew.
    multiprocessing.set_start_method(None, force=True)
    try:
        value = function(*args)
    except SystemExit:
        raise
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise
    pipe.send((value, None))


def _kill(processes):
    for process in processes:
        if process.exitcode is None:  # a frozen one takes no gentler hint
            _end(process)


def _end(process):
    """End a process, and a fork server and loaders that it may have left behind."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def store_on_a_free_port():
    """As torchrun does it: with the store in the process that chooses the port, nobody else can come by it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class World:
    """``size`` processes that run ``function(*args)`` with the environment of torchrun and ``extra``."""

    def __init__(self, size, function, *args, **extra):
        self.store = store_on_a_free_port()
        self.processes = []
        self.pipes = []
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                **{name: str(value) for name, value in extra.items()},
            }
            receiving, sending = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_child, args=(sending, environment, function, args), daemon=True)
            process.start()
            sending.close()
            self.processes.append(process)
            self.pipes.append(receiving)
        weakref.finalize(self, _kill, self.processes)

    def outcomes(self) -> list[Outcome]:
        """Wait for all to end; what does not end in time is killed, with ``code`` None."""
        deadline = time.monotonic() + TIMEOUT_S
        found = []
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            value, error = None, None
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    value, error = pipe.recv()
            except EOFError:
                pass
            process.join(max(0.0, deadline - time.monotonic()))
            code = process.exitcode
            _end(process)
            process.join()
            pipe.close()
            found.append(Outcome(code, value, error))
        return found

    def values(self) -> list[Any]:
        """Wait for all to end well and return their values."""
        outcomes = self.outcomes()
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            assert outcome.code == 0, outcomes
        return [outcome.value for outcome in outcomes]
