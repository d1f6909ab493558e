"""Opening of the table that the plan configures."""

from __future__ import annotations

import logging
import random
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import WORKSPACE, NodeEnvironment
from azureml_elastic.errors import TableNotFound, TableUnavailable, UsageError
from azureml_elastic.node.table.protocol import Table
from azureml_elastic.node.table.sqlite import SqliteTable

if TYPE_CHECKING:
    from azureml_elastic.node.azure.credentials import TableCredential

_LOG = logging.getLogger(__name__)

OPENING_TIMEOUT = timedelta(minutes=5)
"""Time limit for a table that is not available when a node starts."""

_PAUSE_S = (0.1, 1.0)
"""Bounds of the random pause between two attempts, each of which has its own retries."""

EMULATOR_ACCOUNT = "devstoreaccount1"
"""The only account of every emulator."""

# Published by Microsoft and the same in every emulator.
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+|[\w-]+\.table\.[\w.-]+/?")

_ACCEPTED = (
    "Give the rendezvous an endpoint of one of these forms: https://<account>.table.core.windows.net; "
    f"http://127.0.0.1:<port>/{EMULATOR_ACCOUNT} for the emulator Azurite; the path of an SQLite file, or "
    "sqlite:///<path>, for nodes on one machine; or none at all, for the storage account of the job's workspace or of "
    "a connection string in the environment."
)


def emulator_connection_string(endpoint: str, service: str = "table") -> str:
    """Return the connection string for the URL of one of the emulator's services."""
    scheme = urlsplit(endpoint).scheme
    return (
        f"DefaultEndpointsProtocol={scheme};AccountName={EMULATOR_ACCOUNT};AccountKey={_EMULATOR_KEY};"
        f"{service.capitalize()}Endpoint={endpoint};"
    )


def open_table(
    rendezvous: TableRendezvous, run_id: str, environment: NodeEnvironment, *, timeout: timedelta = OPENING_TIMEOUT
) -> Table:
    """Open the table of a run, created if missing.

    A node that starts while the table is not available waits for it and logs so, unless the host name has no address.

    Args:
        run_id: run id; rows of different runs are separate.
        timeout: time limit for a table that is not available.

    Raises:
        UsageError: the form of the endpoint is unknown, or the configured credential is not available.
        TableForbidden: the account refuses the identity.
        TableNotFound: the account does not exist or cannot be reached.
        TableUnavailable: the account does not answer in time.
        KeyInvalid: the run id is empty or too long.
        MissingExtra: the packages of the backend are not installed.
    """
    endpoint = rendezvous.endpoint
    scheme, separator, rest = (endpoint or "").partition("://")
    if endpoint is None or (scheme.lower() in ("http", "https") and urlsplit(endpoint).netloc):
        return _open_azure(rendezvous, run_id, environment, timeout)
    if scheme.lower() == "sqlite" and separator and rest.startswith("/") and rest != "/":
        return SqliteTable(Path(rest[1:]), rendezvous.table, run_id)
    if not separator and endpoint.strip() and not _HOST_AND_PORT.fullmatch(endpoint):
        return SqliteTable(Path(endpoint), rendezvous.table, run_id)
    raise _bad_form(endpoint)


def as_developer(rendezvous: TableRendezvous) -> TableRendezvous:
    """Return the configuration with the login of this process's user, where the plan has the identity of the nodes."""
    if rendezvous.credential == "connection_string":
        return rendezvous
    return rendezvous.model_copy(update={"credential": "developer", "client_id": None})


def connection_string_variable(table: Table, rendezvous: TableRendezvous) -> str | None:
    """Return the name of the environment variable that opened a table, ``None`` where an identity or a file did."""
    if isinstance(table, SqliteTable):
        return None
    from azureml_elastic.node.table.azure import AzureTable

    return (
        rendezvous.connection_string_variable if isinstance(table, AzureTable) and table.by_connection_string else None
    )


def _open_azure(rendezvous: TableRendezvous, run_id: str, environment: NodeEnvironment, timeout: timedelta) -> Table:
    """Open the table of an account, with retries while it is temporarily unavailable."""
    from azureml_elastic.node.azure.workspace import workspace_endpoint
    from azureml_elastic.node.table.azure import AzureTable
    from azureml_elastic.node.table.azure_errors import is_temporary

    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            endpoint, credential = rendezvous.endpoint, _credential(rendezvous, environment)
            if endpoint is None and credential.token is not None:
                endpoint = workspace_endpoint(environment, credential.token)
            return AzureTable(endpoint, rendezvous.table, run_id, credential)
        except (TableUnavailable, TableNotFound) as error:
            left = until - time.monotonic()
            if left <= 0 or not is_temporary(error):
                raise
            _LOG.warning("%s Trying for %.0f s more.", error, left)
            time.sleep(random.uniform(*_PAUSE_S))


def _credential(rendezvous: TableRendezvous, environment: NodeEnvironment) -> TableCredential:
    from azureml_elastic.node.azure.credentials import TableCredential, choose_credential

    endpoint, kind, variable = rendezvous.endpoint, rendezvous.credential, rendezvous.connection_string_variable
    by_connection_string = rendezvous.model_copy(update={"credential": "connection_string"})
    if endpoint is None and kind == "auto" and environment.missing_workspace:
        if not environment.get(variable):
            raise UsageError(
                "The rendezvous names no endpoint, this is no job in an Azure ML workspace "
                f"({', '.join(WORKSPACE)} are not all set), and {variable} holds no connection string. "
                f"{_ACCEPTED}"
            )
        rendezvous = by_connection_string
    elif endpoint is not None and endpoint.lower().startswith("http:"):
        if kind == "auto" and not environment.get(variable):
            if urlsplit(endpoint).path.strip("/") != EMULATOR_ACCOUNT:
                raise _bad_form(endpoint)
            connection_string = emulator_connection_string(endpoint)
            return TableCredential("the emulator's published key", connection_string=connection_string)
        if kind not in ("auto", "connection_string"):
            raise UsageError(
                f"credential={kind!r} sends a token, which must not travel over plain HTTP to "
                f"{endpoint!r}. Use the https:// address, or credential='auto' for an emulator."
            )
        rendezvous = by_connection_string
    return choose_credential(rendezvous, environment)


def _bad_form(endpoint: str) -> UsageError:
    return UsageError(f"The rendezvous endpoint {endpoint!r} has an unknown form. {_ACCEPTED}")
