"""Ends a worker whose process group could never form, because its script has a rank or an address of its own.

In a worker, as under torchrun, each rank is a client of its agent's store, and none serves one. A script that names
another address waits there until its timeout, of half an hour by default, and one with another rank leaves the others
waiting. The check is made where torch looks for the ranks, so that it sees what the script really asks for.
"""

from __future__ import annotations

import functools
import importlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from azureml_elastic.environment import names as variables
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import UsageError

_ANSWER_SECONDS = 5.0
"""How long something may take to listen at the address: a script may serve a store itself."""

_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.2


def attach_to_rendezvous(rendezvous: ModuleType) -> None:
    """Have the module ``torch.distributed.rendezvous`` check what it is asked for."""
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    for scheme in ("env", "tcp"):
        if scheme in handlers and not isinstance(handlers[scheme], functools.partial):
            handlers[scheme] = functools.partial(_checked, handlers[scheme])


def attach_to_spawn(spawn: ModuleType) -> None:
    """Have the module ``torch.multiprocessing.spawn`` make the check in the processes that it starts, too."""
    original = spawn.start_processes
    if isinstance(original, functools.partial):
        return  # attached already
    spawn.start_processes = checked = functools.partial(_start_checked, original)  # type: ignore[attr-defined]
    package = sys.modules.get(spawn.__name__.rpartition(".")[0])
    if getattr(package, "start_processes", None) is original:
        package.start_processes = checked  # type: ignore[union-attr]


def _checked(handler: Callable[..., Iterator[Any]], url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
    check_rendezvous(url, WorkerEnvironment.read())
    return handler(url, *arguments, **options)


def _start_checked(start: Callable[..., Any], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return start(functools.partial(_run_checked, function), *arguments, **options)


def _run_checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function of a spawned process, which has not inherited the check."""
    attach_to_rendezvous(importlib.import_module("torch.distributed.rendezvous"))
    return function(*arguments)


def check_rendezvous(url: str, environment: WorkerEnvironment, *, seconds: float = _ANSWER_SECONDS) -> None:
    """Check that the other ranks can be found.

    Args:
        url: URL of torch's rendezvous, with the rank and the number of ranks where the script gives them.
        seconds: how long to wait for a listener at an address other than that of the agent's store.

    Raises:
        UsageError: nobody listens at the address, or the rank is another one than the worker's.
    """
    own, environ = environment.assigned, environment.variables
    if own is None:
        return  # the script serves a store, as one process for each rank
    rank, size, host, port = own.rank, own.world_size, own.host, own.port
    try:
        parts = urlsplit(url)
        given = parse_qs(parts.query)
        from_environment = parts.scheme == "env"
        to = (environ["MASTER_ADDR"] if from_environment else parts.hostname or "") or host
        at = int(environ["MASTER_PORT"]) if from_environment else parts.port or port
        asked_rank = int(given["rank"][0] if "rank" in given else environ["RANK"])
        asked_size = int(given["world_size"][0] if "world_size" in given else environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return  # torch says what is missing
    if (to, at) != (host, port):
        if _answers(to, at, seconds):
            return  # a store of the script's own
        problem = f"The process group is to be opened at {to}:{at}, where nobody has listened for {seconds:.0f} s."
    elif asked_rank != rank or asked_size > size:
        problem = f"The process group is to be opened as rank {asked_rank} of {asked_size}."
    else:
        return
    raise UsageError(
        f"{problem} The elastic agent has started this process as rank {rank} of {size}, and the ranks meet at "
        f"{host}:{port}. Call init_process_group() without init_method, rank and world_size, in one process for each "
        "rank (process_count_per_instance), and leave RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as they are: "
        'os.environ.setdefault("MASTER_ADDR", ...) sets them without a launcher alone. '
        f"{variables.INTEGRATIONS}=off in the environment switches this check off."
    )


def _answers(host: str, port: int, seconds: float) -> bool:
    """Return whether something listens at an address, now or a little later."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left, _ATTEMPT_SECONDS)):
                return True
        except OSError:
            time.sleep(min(left, _PAUSE_SECONDS))
    return False
