"""A certificate authority that lives as long as a local workspace, and vouches for its hosts alone."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from azureml_elastic.errors import MissingExtra

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise MissingExtra("cryptography", "submit") from missing

__all__ = ["server_context", "write_bundle"]

_VALID = timedelta(days=7)
_SKEW = timedelta(hours=1)


def server_context(hosts: Sequence[str], folder: Path) -> tuple[ssl.SSLContext, str]:
    """Make an authority and a certificate for the hosts; their keys exist for this process only.

    Args:
        hosts: names that the certificate is for.
        folder: private to this user; takes the server's key for the moment in which it is read.

    Returns:
        The server's side of TLS, and the authority's certificate as PEM text.
    """
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "azureml-elastic local workspace")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        _builder(issuer, issuer, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _builder(subject, issuer, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    pem = folder / "server.pem"
    pem.touch(mode=0o600)
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(pem)
    finally:
        pem.unlink()
    return context, authority.public_bytes(serialization.Encoding.PEM).decode()


def write_bundle(authority: str, trusted: Path | None, target: Path) -> Path:
    """Write a file of certificates that trusts the authority besides those that were trusted before.

    Args:
        authority: its certificate as PEM text.
        trusted: the file so far; ``None`` takes the one that requests has.
        target: the file to write.
    """
    if trusted is None:
        import certifi

        trusted = Path(certifi.where())
    target.write_text(f"{trusted.read_text(encoding='utf-8').rstrip()}\n{authority}", encoding="utf-8")
    return target


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
