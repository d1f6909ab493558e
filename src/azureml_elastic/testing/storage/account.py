"""The workspace's storage account: two Azurite emulators behind the host names that Azure's SDKs use.

Requests with a signature are forwarded unchanged, and Azurite verifies it. In requests with a token, which Azurite
accepts over TLS only, the token is replaced by a signature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from http.client import HTTPConnection, HTTPException, InvalidURL
from urllib.parse import urlsplit

from typing_extensions import Self

from azureml_elastic.errors import needs_extra
from azureml_elastic.local.azurite import Azurite
from azureml_elastic.node.table.opening import EMULATOR_ACCOUNT, emulator_connection_string
from azureml_elastic.testing.messages import Answer, MalformedRequest, Request, refusal

with needs_extra("azure-data-tables", "node"):
    from azure.core.credentials import AzureNamedKeyCredential
    from azure.data.tables import ResourceTypes as TableResources
    from azure.data.tables import generate_account_sas as table_account_sas
with needs_extra("azure-ai-ml", "submit"):
    from azure.storage.blob import ContainerClient, generate_account_sas
    from azure.storage.blob import ResourceTypes as BlobResources

__all__ = ["ARTIFACTS", "BLOBS", "StorageAccount"]

BLOBS = "azureml-blobstore"
"""Container of the default datastore."""

ARTIFACTS = "azureml"
"""Container of logs and of the runs' ``./outputs``."""

_VALID = timedelta(days=7)
_TIMEOUT_S = 60.0
_OF_THE_CONNECTION = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding"})


class StorageAccount:
    """A context manager that runs the storage account."""

    account = EMULATOR_ACCOUNT
    blob_host = f"{EMULATOR_ACCOUNT}.blob.core.windows.net"
    table_host = f"{EMULATOR_ACCOUNT}.table.core.windows.net"

    def __init__(self) -> None:
        self._blob = Azurite(service="blob")
        self._table = Azurite(service="table")
        self._stack = contextlib.ExitStack()
        parts = emulator_connection_string("http://127.0.0.1").split(";")
        self.key = dict(part.split("=", 1) for part in parts if part)["AccountKey"]
        expiry = datetime.now(timezone.utc) + _VALID
        everything = BlobResources(service=True, container=True, object=True)
        self.blob_signature = str(
            generate_account_sas(self.account, self.key, everything, "rwdlacup", expiry, protocol="https,http")
        )
        named = AzureNamedKeyCredential(self.account, self.key)
        self._table_signature = str(
            table_account_sas(named, TableResources.from_string("sco"), "rwdlacup", expiry, protocol="https,http")
        )

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor(2) as pool:
                started = [pool.submit(stack.enter_context, service) for service in (self._blob, self._table)]
            for future in started:
                future.result()
            for name in (BLOBS, ARTIFACTS):
                self.make_container(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def table_endpoint(self) -> str:
        """Direct URL of the tables, for nodes that use no token."""
        return self._table.endpoint

    @property
    def hosts(self) -> dict[str, Callable[[Request], Answer]]:
        """Request handlers by host name."""
        return {self.blob_host: self._answer_blob, self.table_host: self._answer_table}

    def container(self, name: str) -> ContainerClient:
        """Return a client of a container; the caller closes it."""
        return ContainerClient.from_connection_string(self._blob.connection_string, name)

    def make_container(self, name: str) -> None:
        """Create a container unless it exists."""
        with self.container(name) as client:
            if not client.exists():
                client.create_container()

    def _answer_blob(self, request: Request) -> Answer:
        return _forward(request, self._blob.endpoint, self.blob_signature)

    def _answer_table(self, request: Request) -> Answer:
        return _forward(request, self._table.endpoint, self._table_signature)


def _forward(request: Request, endpoint: str, signature: str) -> Answer:
    """Forward a request to an emulator with the original host name, which identifies the account."""
    headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_CONNECTION}
    target = request.target
    if headers.get("authorization", "").startswith("Bearer "):
        del headers["authorization"]
        target += f"{'&' if '?' in target else '?'}{signature}"
    headers["host"] = request.host
    address = urlsplit(endpoint)
    assert address.hostname is not None
    try:
        return _call(request, (address.hostname, address.port), target, headers)
    except (InvalidURL, ValueError) as error:
        raise MalformedRequest(f"The request cannot be forwarded: {error}.") from error
    except (OSError, HTTPException) as error:
        return refusal(502, "BadGateway", f"The emulator did not respond: {error!r}")


def _call(request: Request, address: tuple[str, int | None], target: str, headers: dict[str, str]) -> Answer:
    with contextlib.closing(HTTPConnection(*address, timeout=_TIMEOUT_S)) as connection:
        connection.request(request.method, target, request.body or None, headers)
        response = connection.getresponse()
        body = response.read()
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _OF_THE_CONNECTION]
        if request.method != "HEAD":  # a HEAD response keeps the length of the body that is not sent
            kept = [(name, value) for name, value in kept if name.lower() != "content-length"]
        return Answer(response.status, tuple(kept), body)
