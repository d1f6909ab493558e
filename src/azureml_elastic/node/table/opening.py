"""Opening of the table that the plan configures."""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.errors import TableNotFound, TableUnavailable, UsageError
from azureml_elastic.node.table.protocol import Table
from azureml_elastic.node.table.sqlite import SqliteTable

__all__ = ["EMULATOR_ACCOUNT", "OPENING_TIMEOUT", "emulator_connection_string", "open_table"]

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
    rendezvous: TableRendezvous,
    run_id: str,
    environ: Mapping[str, str] = os.environ,
    *,
    timeout: timedelta = OPENING_TIMEOUT,
) -> Table:
    """Open the table of a run, created if missing.

    A node that starts while the table is not available waits for it and logs so, unless the host name has no address.

    Args:
        rendezvous: configuration of endpoint and credential.
        run_id: run id; rows of different runs are separate.
        environ: environment of the node.
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
    if endpoint is None:
        return _retry_while_unavailable(lambda: _open_default(rendezvous, run_id, environ), timeout)
    scheme, separator, rest = endpoint.partition("://")
    match scheme.lower() if separator else "":
        case "https" if urlsplit(endpoint).netloc:
            return _retry_while_unavailable(lambda: _open_azure(endpoint, rendezvous, run_id, environ), timeout)
        case "http" if urlsplit(endpoint).netloc:
            return _retry_while_unavailable(lambda: _open_plain_http(endpoint, rendezvous, run_id, environ), timeout)
        case "sqlite" if rest.startswith("/") and rest != "/":
            return SqliteTable(Path(rest[1:]), rendezvous.table, run_id)
        case "" if endpoint.strip() and not _HOST_AND_PORT.fullmatch(endpoint):
            return SqliteTable(Path(endpoint), rendezvous.table, run_id)
    raise _bad_form(endpoint)


def _retry_while_unavailable(open_once: Callable[[], Table], timeout: timedelta) -> Table:
    """Open the table, with retries while it is temporarily unavailable."""
    from azureml_elastic.node.table.azure_errors import is_temporary

    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return open_once()
        except (TableUnavailable, TableNotFound) as error:
            left = until - time.monotonic()
            if left <= 0 or not is_temporary(error):
                raise
            _LOG.warning("%s Trying for %.0f s more.", error, left)
            time.sleep(random.uniform(*_PAUSE_S))


def _open_default(rendezvous: TableRendezvous, run_id: str, environ: Mapping[str, str]) -> Table:
    from azureml_elastic.node.azure.credentials import choose_credential
    from azureml_elastic.node.azure.workspace import WORKSPACE_VARIABLES, workspace_endpoint
    from azureml_elastic.node.table.azure import AzureTable

    in_azure_ml = all(environ.get(name) for name in WORKSPACE_VARIABLES)
    if rendezvous.credential == "auto" and not in_azure_ml:
        if not environ.get(rendezvous.connection_string_variable):
            raise UsageError(
                "The rendezvous names no endpoint, this is no job in an Azure ML workspace "
                f"({', '.join(WORKSPACE_VARIABLES)} are not all set), and {rendezvous.connection_string_variable} "
                f"holds no connection string. {_ACCEPTED}"
            )
        rendezvous = rendezvous.model_copy(update={"credential": "connection_string"})
    credential = choose_credential(rendezvous, environ)
    endpoint = None if credential.token is None else workspace_endpoint(environ, credential.token)
    return AzureTable(endpoint, rendezvous.table, run_id, credential)


def _open_azure(endpoint: str, rendezvous: TableRendezvous, run_id: str, environ: Mapping[str, str]) -> Table:
    from azureml_elastic.node.azure.credentials import choose_credential
    from azureml_elastic.node.table.azure import AzureTable

    return AzureTable(endpoint, rendezvous.table, run_id, choose_credential(rendezvous, environ))


def _open_plain_http(endpoint: str, rendezvous: TableRendezvous, run_id: str, environ: Mapping[str, str]) -> Table:
    from azureml_elastic.node.azure.credentials import TableCredential, choose_credential
    from azureml_elastic.node.table.azure import AzureTable

    given = environ.get(rendezvous.connection_string_variable)
    if rendezvous.credential == "connection_string" or (rendezvous.credential == "auto" and given):
        credential = choose_credential(rendezvous.model_copy(update={"credential": "connection_string"}), environ)
    elif rendezvous.credential != "auto":
        raise UsageError(
            f"credential={rendezvous.credential!r} sends a token, which must not travel over plain HTTP to "
            f"{endpoint!r}. Use the https:// address, or credential='auto' for an emulator."
        )
    elif urlsplit(endpoint).path.strip("/") == EMULATOR_ACCOUNT:
        credential = TableCredential(
            "the emulator's published key", connection_string=emulator_connection_string(endpoint)
        )
    else:
        raise _bad_form(endpoint)
    return AzureTable(endpoint, rendezvous.table, run_id, credential)


def _bad_form(endpoint: str) -> UsageError:
    return UsageError(f"The rendezvous endpoint {endpoint!r} has an unknown form. {_ACCEPTED}")
