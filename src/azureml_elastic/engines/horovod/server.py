"""The HTTP server of a node to which Horovod's workers speak, and the notifications that the node sends to them.

Source of the protocol: ``horovod/runner/http/http_server.py`` and ``horovod/common/gloo`` of Horovod 0.28.1. A request
names a scope and a key, ``GET /scope/key``. The server listens on the loopback interface alone; what workers of
different nodes tell each other goes through the store of the round.

Notifications say that the hosts have changed, after which workers leave their place at the next commit. Workers listen
for them with Horovod's own service, and send its address and a key to the rendezvous server as a pickled object. It is
loaded only if it came from a process of the worker: all users of the machine reach the port.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.engines.child import Child
from azureml_elastic.engines.horovod.rendezvous import LocalRendezvous
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.ipc.worker_messages import Restored, Step
from azureml_elastic.train.horovod.relay import COMMIT, FAILURES, LOSS, POINTER, RESTORED, SCOPE, STEP

_LOG = logging.getLogger(__name__)

HOST = "127.0.0.1"
_PLACES = "rank_and_size"
_ADDRESSES = "worker_addresses"


class WorkerServer:
    """Serves the workers of this node until it is closed.

    Args:
        agent: the node's agent, which makes their commits.
    """

    def __init__(self, rendezvous: LocalRendezvous, agent: Agent) -> None:
        # The standard library makes a handler of its class for each request: what it needs is in a class of its own.
        handler = type("Handler", (_Handler,), {"served": rendezvous, "agent": agent})
        self._server = ThreadingHTTPServer((HOST, 0), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="horovod", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: LocalRendezvous
    agent: Agent

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(lambda scope, key: self._put(scope, key, body))

    def do_DELETE(self) -> None:
        self._answer(lambda scope, _: self._delete(scope))

    def log_message(self, *args: Any) -> None:
        """Say nothing: workers ask every few milliseconds."""

    def _get(self, scope: str, key: str) -> bytes:
        if scope == _PLACES:
            return self.served.place(int(key.rpartition(":")[2]))
        if scope != SCOPE:
            return self.served.get(scope, key)
        if key == POINTER:
            found = self.agent.pointer()
            return json.dumps(None if found is None else found.to_json()).encode()
        name, local_rank, seen = key.split("-")
        if name != LOSS:
            raise ValueError(key)
        return json.dumps(self.served.loss(int(local_rank), int(seen))).encode()

    def _put(self, scope: str, key: str, body: bytes) -> bytes:
        if scope == _ADDRESSES:
            self.served.notify_at(int(key.rpartition(":")[2]), body, self.client_address[1])
        elif scope != SCOPE:
            self.served.put(scope, key, body)
        elif key == COMMIT:
            commit = json.loads(body)
            self.agent.commit(Reference.from_json(commit["reference"]), commit["stall_seconds"])
        elif key == STEP:
            self.agent.report(Step(int(json.loads(body))))
        elif key == RESTORED:
            self.agent.report(Restored(int(json.loads(body))))
        else:
            raise ValueError(key)
        return b""

    def _delete(self, scope: str) -> bytes:
        self.served.delete(scope)
        return b""

    def _answer(self, respond: Callable[[str, str], bytes]) -> None:
        status = int(HTTPStatus.OK)
        try:
            _, scope, key = self.path.split("/", 2)
            body = respond(scope, key)
        except ElasticError as error:
            status, body = FAILURES.get(type(error), 500), str(error).encode()
            _LOG.warning("%s %s of a worker failed: %s", self.command, self.path, error)
        except RuntimeError as error:  # of a round that is over
            status, body = 500, str(error).encode()
            _LOG.debug("%s %s of a worker: %s", self.command, self.path, error)
        except (ValueError, KeyError, TypeError) as error:
            status, body = 400, repr(error).encode()
            _LOG.warning("%s %s of a worker is malformed: %r", self.command, self.path, error)
        with contextlib.suppress(ConnectionError):  # the worker has ended
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


class Notifications:
    """Notifies the workers of one node. Thread-safe."""

    def __init__(self) -> None:
        self._clients: dict[int, tuple[int, bytes]] = {}

    def listens(self, local_rank: int, worker: Child, value: bytes, port: int) -> None:
        """Remember where a worker listens: its addresses and key as Horovod encodes them, by a port of a connection."""
        if _is_from(worker, port):
            self._clients[local_rank] = (worker.pid, value)
        else:
            _LOG.warning("Refused the address of worker %d from a process that is none of the worker's.", local_rank)

    def notify(self, local_rank: int, worker: Child) -> None:
        """Notify a worker, if it listens. Returns at once: a stopped process would not answer."""
        pid, value = self._clients.get(local_rank, (0, b""))
        if pid == worker.pid:
            threading.Thread(target=_notify, args=(value,), name="notification", daemon=True).start()


def _notify(value: bytes) -> None:
    from horovod.runner.common.util import codec
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient

    # The worker listens on the same port of all interfaces, of which the client would try each in turn.
    addresses, key = codec.loads_base64(value)
    port = next(port for found in addresses.values() for _, port in found)
    with contextlib.suppress(Exception):  # of Horovod's client, which raises anything where the worker has ended
        client = WorkerNotificationClient({"lo": [("127.0.0.1", port)]}, key, 0)
        # Workers compare the time with that of the notification before. "mixed" has them synchronize their state.
        client.notify_hosts_updated(time.time_ns(), HostUpdateResult.mixed)


def _is_from(worker: Child, port: int) -> bool:
    """Return whether a connection's client is a process of the worker."""
    for process in worker.tree():
        with contextlib.suppress(psutil.Error):
            if any(each.laddr and each.laddr.port == port for each in process.net_connections("tcp")):
                return True
    return False
