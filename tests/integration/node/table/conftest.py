"""Real HTTP servers on this machine that answer as a test wants."""

import contextlib
import json
import threading
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string


@dataclass
class Call:
    method: str
    path: str
    query: dict
    headers: dict
    body: bytes
    target: str

    @property
    def form(self):
        return {name: values[0] for name, values in parse_qs(self.body.decode()).items()}


@dataclass
class Web:
    """An HTTP server; ``answer`` takes a call and returns status and body, or ``None`` to hang up without an answer.

    ``tls`` is an ``ssl.SSLContext`` for servers of HTTPS.
    """

    answer: object
    tls: object = None
    calls: list = field(default_factory=list)

    @contextlib.contextmanager
    def serving(self):
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                call = Call(self.command, parts.path, query, dict(self.headers), body, self.path)
                web.calls.append(call)
                reply = web.answer(call)
                if reply is None:
                    self.close_connection = True
                    return
                status, content, headers = (*reply, {})[:3]
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in ({"Content-Type": "application/json"} | headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - the base class's names

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False
            request_queue_size = 256

            def handle_error(self, *_):
                pass  # clients that hang up

            def finish_request(self, request, address):
                connections.add(request)
                super().finish_request(request, address)

        connections = set()
        with Server(("127.0.0.1", 0), Handler) as server:
            if self.tls is not None:
                server.socket = self.tls.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            self.port = server.server_address[1]
            self.url = f"http://127.0.0.1:{self.port}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()
                for connection in connections:
                    with contextlib.suppress(OSError):
                        connection.shutdown(2)


@pytest.fixture
def serve():
    """Start servers: ``serve(answer, tls)`` returns a ``Web`` that runs until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda answer, tls=None: stack.enter_context(Web(answer, tls).serving())


class Faulty:
    """Forwards to the emulator; the next calls of a method can be spoiled.

    Args:
        azurite: that all goes to.
    """

    def __init__(self, azurite):
        self._target = urlsplit(azurite.endpoint)
        self._plan = []

    def spoil(self, method, *ways):
        """Spoil the next calls of this method, one way each: ``lose`` the answer, or a function of the call."""
        self._plan += [(method, way) for way in ways]

    def __call__(self, call):
        for index, (method, way) in enumerate(self._plan):
            if method == call.method:
                del self._plan[index]
                if way != "lose":
                    return way(call)
                self.forward(call)
                return None
        return self.forward(call)

    def forward(self, call):
        connection = HTTPConnection(self._target.hostname, self._target.port, timeout=20)
        with contextlib.closing(connection):
            headers = {name: value for name, value in call.headers.items() if name.lower() != "connection"}
            connection.request(call.method, call.target, call.body or None, headers)
            response = connection.getresponse()
            data = response.read()
            skip = {"content-length", "transfer-encoding", "connection", "keep-alive", "content-type"}
            kept = {name: value for name, value in response.getheaders() if name.lower() not in skip}
            kind = {"Content-Type": response.getheader("Content-Type") or "application/json"}
            return response.status, data, kept | kind


@pytest.fixture
def faulty(azurite, serve):
    """A way to the emulator that fails on demand: the faults and the connection string to pass them."""
    faults = Faulty(azurite)
    web = serve(faults)
    return faults, emulator_connection_string(f"{web.url}/{EMULATOR_ACCOUNT}")
