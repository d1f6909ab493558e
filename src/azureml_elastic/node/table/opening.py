"""From the plan's words to the open table."""

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
"""With a table that is away when a node starts."""

_PAUSE_S = (0.1, 1.0)
"""Between two attempts, each of which has had timeout of its own; at random, as nodes often start together."""

EMULATOR_ACCOUNT = "devstoreaccount1"
"""The one account of every emulator."""

# Published by Microsoft, the same in every emulator, and of no use anywhere else.
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+|[\w-]+\.table\.[\w.-]+/?")

_ACCEPTED = (
    "Give the rendezvous an endpoint of one of these forms: https://<account>.table.core.windows.net; "
    f"http://127.0.0.1:<port>/{EMULATOR_ACCOUNT} for the emulator Azurite; the path of an SQLite file, or "
    "sqlite:///<path>, for nodes on one machine; or none at all, for the storage account of the job's workspace or of "
    "a connection string in the environment."
)


def emulator_connection_string(endpoint: str, service: str = "table") -> str:
    """Return the connection string for the URL of one of an emulator's services."""
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
    """Open the table of a run, which is made when missing.

    A node that comes while the table is away waits for it, and says so in its log. A host that has no address is not
    waited for: its name is wrong.

    Args:
        rendezvous: says where, and with which identity.
        run_id: names the run; its rows are apart from those of all other runs.
        environ: of the node.
        timeout: with a table that is away.

    Raises:
        UsageError: the endpoint is of no known form, or the identity asked for is not there.
        TableForbidden: the account refuses the identity.
        TableNotFound: the account does not exist or cannot be reached.
        TableUnavailable: the account does not answer in time.
        KeyInvalid: the run's name is empty or too long.
        MissingExtra: the backend's packages are not installed.
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


def _retry_while_unavailable(opened: Callable[[], Table], timeout: timedelta) -> Table:
    """Open the table, again and again while it may only be away."""
    from azureml_elastic.node.table.azure_errors import may_pass

    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return opened()
        except (TableUnavailable, TableNotFound) as error:
            left = until - time.monotonic()
            if left <= 0 or not may_pass(error):
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
                "The rendezvous names no endpoint, this is no job of Azure ML whose workspace could be asked "
                f"({', '.join(WORKSPACE_VARIABLES)} are not all set), and {rendezvous.connection_string_variable} "
                f"holds no connection string. {_ACCEPTED}"
            )
        rendezvous = rendezvous.model_copy(update={"credential": "connection_string"})
    login = choose_credential(rendezvous, environ)
    endpoint = None if login.token is None else workspace_endpoint(environ, login.token)
    return AzureTable(endpoint, rendezvous.table, run_id, login)


def _open_azure(endpoint: str, rendezvous: TableRendezvous, run_id: str, environ: Mapping[str, str]) -> Table:
    from azureml_elastic.node.azure.credentials import choose_credential
    from azureml_elastic.node.table.azure import AzureTable

    return AzureTable(endpoint, rendezvous.table, run_id, choose_credential(rendezvous, environ))


def _open_plain_http(endpoint: str, rendezvous: TableRendezvous, run_id: str, environ: Mapping[str, str]) -> Table:
    from azureml_elastic.node.azure.credentials import TableCredential, choose_credential
    from azureml_elastic.node.table.azure import AzureTable

    given = environ.get(rendezvous.connection_string_variable)
    if rendezvous.credential == "connection_string" or (rendezvous.credential == "auto" and given):
        login = choose_credential(rendezvous.model_copy(update={"credential": "connection_string"}), environ)
    elif rendezvous.credential != "auto":
        raise UsageError(
            f"credential={rendezvous.credential!r} sends a token, which must not travel over plain HTTP to "
            f"{endpoint!r}. Use the https:// address, or credential='auto' for an emulator."
        )
    elif urlsplit(endpoint).path.strip("/") == EMULATOR_ACCOUNT:
        login = TableCredential("the emulator's published key", connection_string=emulator_connection_string(endpoint))
    else:
        raise _bad_form(endpoint)
    return AzureTable(endpoint, rendezvous.table, run_id, login)


def _bad_form(endpoint: str) -> UsageError:
    return UsageError(f"The rendezvous endpoint {endpoint!r} is of no known form. {_ACCEPTED}")
