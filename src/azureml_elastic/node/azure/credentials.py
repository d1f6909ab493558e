"""Credentials for the table, on nodes of Azure ML and elsewhere.

Azure ML serves tokens at an address on the node: for the compute's managed identity and, if the job was submitted with
the user's identity, for that user (*on behalf of*). azure-identity takes that address for an Azure Cloud Shell if no
secret is set, and then rejects client ids; therefore the requests are made here.
"""

from __future__ import annotations

import calendar
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import MissingExtra, TableForbidden, TableUnavailable, UsageError
from azureml_elastic.node.azure.http import HttpRequest, fetch

try:
    from azure.core.credentials import AccessToken, TokenCredential
    from azure.core.exceptions import AzureError
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

STORAGE_SCOPE = "https://storage.azure.com/.default"
"""Token scope of Azure Tables."""

_LOG = logging.getLogger(__name__)
_RENEW_BEFORE_S = 300.0
_TRY_NEXT_METHOD = frozenset({404, 405, 501})


@dataclass(frozen=True)
class TableCredential:
    """Credential for a table account: either a token credential or a connection string.

    Args:
        connection_string: connection string with an account key or a shared access signature.
    """

    name: str
    token: TokenCredential | None = field(default=None, repr=False)
    connection_string: str | None = field(default=None, repr=False)


@dataclass
class NodeTokenCredential:
    """Token credential that uses the address served by Azure ML on the node; implements ``TokenCredential``.

    Tokens are cached until five minutes before they expire. Thread-safe.

    Args:
        requests: function from a resource to the requests for its token; later ones are tried if the service does not
            support the earlier ones.
    """

    name: str
    requests: Callable[[str], list[HttpRequest]]
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._tokens: dict[str, AccessToken] = {}
        self._lock = threading.Lock()

    @classmethod
    def managed(cls, environment: NodeEnvironment, client_id: str | None) -> NodeTokenCredential:
        """Return the credential of the node's managed identity, by default of ``DEFAULT_IDENTITY_CLIENT_ID``."""
        address, secret = environment.variables["MSI_ENDPOINT"], environment.msi_secret
        client_id = client_id or environment.default_client_id

        def requests(resource: str) -> list[HttpRequest]:
            if secret:
                query = {"api-version": "2017-09-01", "resource": resource}
                query |= {"clientid": client_id} if client_id else {}
                return [HttpRequest("GET", _with_query(address, query), headers={"secret": secret})]
            form = {"resource": resource} | ({"client_id": client_id} if client_id else {})
            headers = {"Metadata": "true"}
            return [
                HttpRequest("POST", address, data=form, headers=headers),
                HttpRequest("GET", _with_query(address, form), headers=headers),
            ]

        name = f"user-assigned, client id {client_id}" if client_id else "system-assigned"
        return cls(f"the node's managed identity ({name})", requests)

    @classmethod
    def on_behalf_of(cls, environment: NodeEnvironment) -> NodeTokenCredential:
        """Return the credential of the user who submitted the job, from ``OBO_ENDPOINT``."""
        address = environment.variables["OBO_ENDPOINT"]
        return cls(
            "the identity of the user who submitted the job",
            lambda resource: [HttpRequest("GET", _with_query(address, {"resource": resource}))],
        )

    def get_token(self, *scopes: str, **_options: Any) -> AccessToken:
        """Return a token that is valid for at least five minutes, unless the node issues shorter ones.

        Args:
            scopes: exactly one scope, such as ``https://storage.azure.com/.default``.

        Raises:
            TableForbidden: the node issues no token for this identity.
            TableUnavailable: the address on the node does not answer.
        """
        (scope,) = scopes
        resource = scope.removesuffix("/.default")
        with self._lock:
            token = self._tokens.get(resource)
            # Under the lock, so that of several threads only one asks for a new token.
            if token is None or token.expires_on - self.clock() < _RENEW_BEFORE_S:
                token = self._tokens[resource] = self._request(resource)
            return token

    def _request(self, resource: str) -> AccessToken:
        for request in self.requests(resource):
            # Without a proxy: the address is that of the node itself.
            reply = fetch(request, f"a token of {self.name}", direct=True)
            if reply.status not in _TRY_NEXT_METHOD:
                break
        content = reply.document if isinstance(reply.document, dict) else {}
        text = content.get("access_token") or content.get("token")
        if reply.status == HTTPStatus.OK and isinstance(text, str):
            return AccessToken(text, self._expiry(content))
        detail = content.get("error_description") or content.get("error") or content.get("message") or "no token"
        raise TableForbidden(
            f"The node gives no token of {self.name} for {resource} (HTTP {reply.status}: {detail}). Assign the "
            "identity to the compute, or submit the job with that identity, and grant it the role 'Storage Table Data "
            "Contributor' on the storage account."
        )

    def _expiry(self, content: Mapping[str, Any]) -> int:
        on = content.get("expires_on", content.get("expiresOn"))
        return _epoch(str(on)) if on is not None else int(self.clock()) + int(content.get("expires_in") or 0)


def choose_credential(rendezvous: TableRendezvous, environment: NodeEnvironment) -> TableCredential:
    """Return the credential for the table.

    ``auto`` selects the first that yields a token of: the node's managed identity, the identity of the submitting user,
    the connection string, the developer's login.

    Raises:
        UsageError: the configured credential is not available.
        TableForbidden: no available identity gets a token.
        TableUnavailable: the token service of the node does not answer.
    """
    variable = rendezvous.connection_string_variable
    factories: dict[str, Callable[[], TableCredential]] = {
        "managed_identity": lambda: _managed(rendezvous, environment),
        "on_behalf_of": lambda: _on_behalf_of(environment),
        "connection_string": lambda: _connection_string(variable, environment),
        "developer": developer_credential,
    }
    if rendezvous.credential != "auto":
        return factories[rendezvous.credential]()
    required = {"managed_identity": "MSI_ENDPOINT", "on_behalf_of": "OBO_ENDPOINT", "connection_string": variable}
    refusals: list[str] = []
    for kind, factory in factories.items():
        if kind in required and not environment.get(required[kind]):
            continue
        credential = factory()
        try:
            if credential.token is not None:
                credential.token.get_token(STORAGE_SCOPE)
        except (TableForbidden, TableUnavailable, AzureError) as error:
            refusals.append(f"{credential.name}: {str(error).strip().splitlines()[0]}")
            _LOG.debug("Credential for the table skipped: %s", refusals[-1])
        else:
            _LOG.debug("Credential for the table: %s", credential.name)
            return credential
    raise TableForbidden(
        "No identity can open the table. Tried in order: " + " | ".join(refusals) + " | Give the compute "
        "a managed identity, submit the job with the user's identity, or name one with the rendezvous' credential=; "
        "it needs the role 'Storage Table Data Contributor' on the storage account. "
        f"A connection string would be read from {variable}."
    )


def _managed(rendezvous: TableRendezvous, environment: NodeEnvironment) -> TableCredential:
    if environment.msi_endpoint:
        identity = NodeTokenCredential.managed(environment, rendezvous.client_id)
        return TableCredential(identity.name, token=identity)
    try:
        from azure.identity import ManagedIdentityCredential
    except ImportError as error:
        raise MissingExtra("azure-identity", "node") from error
    return TableCredential(
        "this machine's managed identity", token=ManagedIdentityCredential(client_id=rendezvous.client_id)
    )


def _on_behalf_of(environment: NodeEnvironment) -> TableCredential:
    if not environment.obo_endpoint:
        raise UsageError(
            "credential='on_behalf_of' needs the environment variable OBO_ENDPOINT, which Azure ML sets for jobs that "
            "were submitted with identity=UserIdentityConfiguration(). Submit the job so, or use another credential."
        )
    identity = NodeTokenCredential.on_behalf_of(environment)
    return TableCredential(identity.name, token=identity)


def _connection_string(variable: str, environment: NodeEnvironment) -> TableCredential:
    text = environment.get(variable)
    if not text:
        raise UsageError(
            f"credential='connection_string' needs a storage connection string in the environment variable {variable}, "
            "which is not set. Set it, or name another variable with connection_string_variable=."
        )
    return TableCredential(f"connection string in {variable}", connection_string=text)


def developer_credential() -> TableCredential:
    """Return the credential of the developer's own login.

    Raises:
        MissingExtra: azure-identity is not installed.
    """
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise MissingExtra("azure-identity", "node") from error
    return TableCredential("the developer's login (az login, environment, IDE)", token=DefaultAzureCredential())


def _with_query(address: str, query: Mapping[str, str]) -> str:
    return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"


def _epoch(text: str) -> int:
    """Parse an expiry time: seconds since the epoch, ``06/20/2019 02:57:58 +00:00`` or ISO 8601."""
    if text.isdigit():
        return int(text)
    bare = text.removesuffix(" +00:00").removesuffix("+00:00").removesuffix("Z").partition(".")[0]
    for form in ("%m/%d/%Y %H:%M:%S", "%m/%d/%Y %I:%M:%S %p", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"):
        try:
            return calendar.timegm(time.strptime(bare, form))
        except ValueError:
            continue
    return 0  # an unknown format: the token is not cached
