"""TLS between processes that know the fingerprint of each other's certificate, without a certificate authority.

The server signs its certificate itself. Clients learn its fingerprint in another way that they trust, and accept no
other certificate (RFC 7469 calls this pinning). Nothing authenticates the client: do so beforehand, with
:mod:`~azureml_elastic.ipc.authentication`, and authenticate its first message in the TLS connection, too.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import os
import socket
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from azureml_elastic.ipc.authentication import AuthenticationError

__all__ = ["ServerCertificate", "connect"]

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "azureml-elastic")])


class ServerCertificate:
    """A new key of the curve P-256, with a certificate that it has signed itself. Both stay in memory.

    Attributes:
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.
    """

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_NAME)
            .issuer_name(_NAME)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # Clients check the fingerprint alone: clocks of different machines are never compared.
            .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.timezone.utc))
            .not_valid_after(dt.datetime(2100, 1, 1, tzinfo=dt.timezone.utc))
            .sign(key, hashes.SHA256())
        )
        self.fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        # The ssl module reads keys from files only: this one is memory that has no name.
        with open(os.memfd_create("certificate", os.MFD_CLOEXEC), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(private + certificate.public_bytes(Encoding.PEM))
            file.flush()
            self._context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """Return the TLS connection over a socket whose peer calls :func:`connect`.

        Raises:
            OSError: the peer did not, or the socket's timeout has passed.
        """
        return self._context.wrap_socket(sock, server_side=True)


def connect(sock: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """Return the TLS connection over a socket to the process that has a certificate.

    Args:
        sock: connected socket; the connection takes over its timeout.
        fingerprint: SHA-256 of the certificate, in hexadecimal digits.

    Raises:
        AuthenticationError: the other end has another certificate.
        OSError: the other end does not speak TLS, or the socket's timeout has passed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is checked instead
    secured = context.wrap_socket(sock)
    found = hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(found, fingerprint):
        secured.close()
        raise AuthenticationError("the other end has another certificate than it has said")
    return secured
