"""A private key and its certificate that all nodes of a run derive from the run's key: mutual TLS without an authority.

Every node derives the same bytes, so nothing is sent. The certificate has signed itself and is the only one that
processes with it trust: it is at once their authority and their own certificate, as server and as client.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from azureml_elastic.errors import EngineError

__all__ = ["derive_credentials", "tls_context", "write_credentials"]

_KEY_BYTES = 32
_SERIAL = 1


def derive_credentials(key: bytes, purpose: str) -> bytes:
    """Return a private key and its certificate as PEM, always the same for the same arguments.

    The private key is of Ed25519, whose keys are any 32 bytes and whose signatures are deterministic (RFC 8032). It is
    derived with HKDF (RFC 5869), so it reveals nothing of the key, nor of the credentials for other purposes.

    Args:
        key: key that only the run's nodes have.
        purpose: name of what the credentials are for; the certificate's name has it.

    Raises:
        EngineError: there is no key.
    """
    if not key:
        raise EngineError(
            f"This node has no key of the run (0 bytes), so the connections of {purpose} cannot be secured. The node's "
            "agent passes it on from the run's table: start the job with the same version of azureml-elastic on all "
            "nodes, and not with an agent of your own."
        )
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


def write_credentials(pem: bytes, folder: str, purpose: str) -> Path:
    """Write credentials to a file that only this process's user can read, and return its path.

    Other credentials get another path, so that a process that was started with these keeps them.

    Args:
        pem: the private key and its certificate.
        folder: folder that only this process's user can enter.
        purpose: first part of the file's name.
    """
    path = Path(folder, f"{purpose}-{hashlib.sha256(pem).hexdigest()[:16]}.pem")
    descriptor, unfinished = tempfile.mkstemp(dir=folder)  # of mode 0600
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(pem)
    os.replace(unfinished, path)  # noqa: PTH105 - a process that starts reads all of it, or nothing
    return path


def tls_context(path: Path) -> ssl.SSLContext:
    """Return the context of a client that has these credentials and accepts no others.

    Args:
        path: file of the credentials.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is that of all nodes
    context.load_verify_locations(path)
    context.load_cert_chain(path)
    return context
