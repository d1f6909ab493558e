"""TLS connections between ends that derive their certificate from a secret that they share."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from azureml_elastic.ipc.authentication import AuthenticationError
from azureml_elastic.ipc.tls import derive_credentials, secure

KEY = bytes(range(32))


class Server:
    """The other end of a pair of sockets, on a thread."""

    def __init__(self, serve):
        self.client, server = socket.socketpair()
        for sock in (self.client, server):
            sock.settimeout(20)
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(serve, server))
        self._thread.start()

    def _run(self, serve, sock):
        with sock:
            try:
                serve(sock)
            except OSError as error:
                self.error = error

    def close(self):
        self._thread.join()
        self.client.close()


@pytest.fixture
def started():
    servers = []
    yield lambda serve: servers.append(Server(serve)) or servers[-1]
    for server in servers:
        server.close()


def echo(sock):
    with secure(sock, KEY, is_server=True) as secured:
        secured.sendall(secured.recv(100))


def test_bytes_arrive_at_the_server_that_has_the_key(started):
    with secure(started(echo).client, KEY, is_server=False) as secured:
        secured.sendall(b"content")
        assert secured.recv(100) == b"content"
        assert secured.version() == "TLSv1.3"


def test_a_server_with_another_key_is_refused(started):
    with pytest.raises(AuthenticationError, match="not derived from this connection's key"):
        secure(started(echo).client, bytes(32), is_server=False)


@pytest.mark.parametrize("certificate", ["none", "of another key"])
def test_a_client_that_cannot_derive_the_certificate_is_refused(started, tmp_path, certificate):
    server = started(echo)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate != "none":
        (tmp_path / "key.pem").write_bytes(derive_credentials(bytes(32), "connection"))
        context.load_cert_chain(tmp_path / "key.pem")
    with context.wrap_socket(server.client) as secured, pytest.raises(OSError, match=r"ALERT|closed|reset"):
        secured.recv(100)
    server.close()
    assert isinstance(server.error, ssl.SSLError | AuthenticationError)


def test_a_server_without_tls_is_refused(started):

    def serve(sock):
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        sock.recv(1000)

    server = started(serve)
    with pytest.raises(ssl.SSLError):
        secure(server.client, KEY, is_server=False)


def test_a_client_without_tls_is_refused(started):
    server = started(echo)
    server.client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    server.close()
    assert isinstance(server.error, ssl.SSLError)


def test_an_older_version_of_tls_is_refused(started):
    server = started(echo)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        context.wrap_socket(server.client)
