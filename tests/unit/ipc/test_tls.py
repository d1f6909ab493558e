"""TLS connections whose server's certificate is known by its fingerprint."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from azureml_elastic.ipc.authentication import AuthenticationError
from azureml_elastic.ipc.tls import ServerCertificate, connect

CERTIFICATE = ServerCertificate()


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
    with CERTIFICATE.accept(sock) as secured:
        secured.sendall(secured.recv(100))


def test_bytes_arrive_at_the_server_that_has_the_certificate(started):
    with connect(started(echo).client, CERTIFICATE.fingerprint) as secured:
        secured.sendall(b"content")
        assert secured.recv(100) == b"content"
        assert secured.version() == "TLSv1.3"


def test_another_certificate_is_refused(started):
    with pytest.raises(AuthenticationError, match="another certificate"):
        connect(started(echo).client, ServerCertificate().fingerprint)


def test_a_server_without_tls_is_refused(started):

    def serve(sock):
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        sock.recv(1000)

    server = started(serve)
    with pytest.raises(ssl.SSLError):
        connect(server.client, CERTIFICATE.fingerprint)


def test_a_client_without_tls_is_refused(started):
    server = started(CERTIFICATE.accept)
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
