"""TLS of the local workspace: a temporary certificate authority for its host names."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from azureml_elastic.errors import MissingExtra

try:
    import trustme
except ImportError as missing:
    raise MissingExtra("trustme", "testing") from missing

__all__ = ["server_context", "write_bundle"]


def server_context(hosts: Sequence[str]) -> tuple[ssl.SSLContext, str]:
    """Create a certificate authority and a certificate for the hosts, whose keys never leave this process.

    Args:
        hosts: host names of the certificate.

    Returns:
        The TLS context of the server, and the authority's certificate as PEM text.
    """
    authority = trustme.CA(organization_name="azureml-elastic local workspace")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*hosts).configure_cert(context)
    return context, authority.cert_pem.bytes().decode()


def write_bundle(authority: str, trusted: Path | None, target: Path) -> Path:
    """Write a certificate bundle that trusts the authority in addition to the existing ones, and return its path.

    Args:
        authority: certificate of the authority as PEM text.
        trusted: existing bundle; ``None`` for that of certifi.
        target: path of the new bundle.
    """
    if trusted is None:
        import certifi

        trusted = Path(certifi.where())
    target.write_text(f"{trusted.read_text(encoding='utf-8').rstrip()}\n{authority}", encoding="utf-8")
    return target
