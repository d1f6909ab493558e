"""The private key and certificate of an engine's processes, which all nodes of a run derive, in files."""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
from pathlib import Path

from azureml_elastic.errors import EngineError
from azureml_elastic.ipc import tls

__all__ = ["derive_credentials", "tls_context", "write_credentials"]


def derive_credentials(key: bytes, purpose: str) -> bytes:
    """Return the credentials of the run's engine; see :func:`azureml_elastic.ipc.tls.derive_credentials`.

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
    return tls.derive_credentials(key, purpose)


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
