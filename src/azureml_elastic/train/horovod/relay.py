"""The way from a Horovod worker to the node's agent: through the server of the node's engine.

A worker reports its commits, commits its checkpoints, and learns of the loss of other workers.

Horovod's operations fail at once only where they wait for the lost worker itself; others wait for each other until a
timeout, ``HOROVOD_GLOO_TIMEOUT_SECONDS``, which is 30 by default. A thread of this process shuts the connections down
once the engine knows of the loss.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from typing import Any

from typing_extensions import override

from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.distributed.process_groups import abort_gloo
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import ElasticError, Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import Action, WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent

SCOPE = "azureml_elastic"
"""Scope of these requests on the server, beside those of Horovod."""

COMMIT = "commit"
LOSS = "loss"
POINTER = "pointer"
RESTORED = "restored"
STEP = "step"
FAILURES: dict[type[ElasticError], int] = {Fenced: 409, TableUnavailable: 503}
"""HTTP status of each error that the agent may answer with."""

_TIMEOUT_SECONDS = 90.0

Address = tuple[str, int]

_LOG = logging.getLogger(__name__)
_started = threading.Lock()


def server_address() -> Address | None:
    """Return host and port of the engine's server, ``None`` where no engine has started this process."""
    return WorkerEnvironment.read().horovod_server


def request(address: Address, method: str, name: str, body: Any = None, timeout: float | None = None) -> Any:
    """Send a request to the engine's server, and return what it answers.

    Raises:
        TableUnavailable: it does not answer, or the agent cannot access the table.
        Fenced: a newer round has taken over.
        ElasticError: the request has failed for another reason.
    """
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        connection.request(method, f"/{SCOPE}/{name}", None if body is None else json.dumps(body))
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise TableUnavailable(f"The node's engine did not answer {method} {name}: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        kind = next((each for each, status in FAILURES.items() if status == response.status), ElasticError)
        raise kind(content.decode(errors="replace"))
    return json.loads(content) if content else None


class RelayedAgent(StandaloneAgent):
    """The node's agent, as far as the commits of rank 0 need it, at the address of the engine's server."""

    def __init__(self, storage: Storage, identity: WorkerIdentity, address: Address) -> None:
        super().__init__(storage, identity, handles_signals=False)
        self._address = address

    @override
    def pointer(self) -> Reference | None:
        found = self._request("GET", POINTER)
        return None if found is None else Reference.from_json(found)

    @override
    def commit(self, reference: Reference, stall_seconds: float) -> None:
        self._request("PUT", COMMIT, {"reference": reference.to_json(), "stall_seconds": stall_seconds})

    @override
    def restored(self, step: int, directory: str | None) -> None:
        self._request("PUT", RESTORED, step)

    @override
    def completed(self, step: int, samples: int = 0) -> Action | None:
        self._request("PUT", STEP, step)
        return None

    def _request(self, method: str, name: str, body: Any = None) -> Any:
        return request(self._address, method, name, body, _TIMEOUT_SECONDS)


def watch_for_losses(address: Address) -> None:
    """Start the thread, once in this process."""
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, args=(address,), name="loss-watch", daemon=True).start()


def _watch(address: Address) -> None:
    worker, seen = WorkerEnvironment.read().horovod_local_rank, 0
    while True:
        try:
            # To ask again tells the engine that the connections are down.
            seen = request(address, "GET", f"{LOSS}-{worker}-{seen}")
        except ElasticError as error:
            _LOG.debug("The engine has ended: %s", error)
            return
        abort_gloo()
