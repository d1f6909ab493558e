"""Mutual TLS 1.3 without an authority: both ends derive the same private key and certificate from a secret they share.

Every holder of the secret derives the same bytes, so nothing is sent. The certificate has signed itself and is the only
one that processes with it trust: it is at once their authority and their own certificate, as server and as client.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from azureml_elastic.ipc.authentication import AuthenticationError

_KEY_BYTES = 32
_SERIAL = 1
_CERTIFICATE = b"-----BEGIN CERTIFICATE"


def derive_credentials(key: bytes, purpose: str) -> bytes:
    """Return a private key and its certificate as PEM, always the same for the same arguments.

    The private key is of Ed25519, whose keys are any 32 bytes and whose signatures are deterministic (RFC 8032). It is
    derived with HKDF (RFC 5869), so it reveals nothing of the key, nor of the credentials for other purposes.

    Args:
        key: secret that only those have who may trust each other.
        purpose: name of what the credentials are for; the certificate's name has it.
    """
    seed = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"azureml-elastic tls " + purpose.encode()).derive(key)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    public = private.public_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"azureml-elastic {purpose}")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(_SERIAL)
        # The key is that of one run: clocks of different machines are never compared.
        .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.timezone.utc))
        .not_valid_after(dt.datetime(2100, 1, 1, tzinfo=dt.timezone.utc))
        # What OpenSSL asks of an authority with X509_V_FLAG_X509_STRICT, Python's default since 3.13.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(private, algorithm=None)
    )
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem + certificate.public_bytes(Encoding.PEM)


def secure(sock: socket.socket, key: bytes, *, is_server: bool) -> ssl.SSLSocket:
    """Return the TLS connection over a socket to a process that calls this with the same key.

    Args:
        sock: connected socket; the connection takes over its timeout.
        key: secret that both ends share.
        is_server: whether this end waits for the other one.

    Raises:
        AuthenticationError: the other end does not have the key.
        OSError: the other end does not speak TLS or does not accept this end, or the socket's timeout has passed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is that of both ends
    context.verify_mode = ssl.CERT_REQUIRED
    pem = derive_credentials(key, "connection")
    context.load_verify_locations(cadata=pem[pem.index(_CERTIFICATE) :].decode())
    # The ssl module reads private keys from files only: this one is memory that has no name.
    with open(os.memfd_create("credentials", os.MFD_CLOEXEC), "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    try:
        return context.wrap_socket(sock, server_side=is_server)
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError("the other end's certificate is not derived from this connection's key") from error
