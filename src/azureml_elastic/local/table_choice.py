"""The table of a local cluster, with its emulator and its fault-injecting proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from azureml_elastic.config import Credential
from azureml_elastic.environment.names import AZURE_STORAGE_CONNECTION_STRING as CONNECTION_STRING
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.summary import Paths
from azureml_elastic.local.faults.model import Schedule
from azureml_elastic.local.faults.table_proxy import TableProxy
from azureml_elastic.node.table.opening import emulator_connection_string

__all__ = ["SQLITE_TABLE", "TableChoice", "check_table", "connection_endpoint", "open_table_choice"]

SQLITE_TABLE = "table.sqlite"
"""Name of the table's file in the run's folder."""

_EMULATOR_ENDPOINT = "http://127.0.0.1:10002/devstoreaccount1"


@dataclass(frozen=True)
class TableChoice:
    """Table of a run.

    Args:
        endpoint: table endpoint, see :class:`~azureml_elastic.config.TableRendezvous`.
        credential: kind of credential that opens the table.
        environment: environment variables that the nodes need for it.
        proxy: fault-injecting proxy in front of the table, if there is one.
    """

    endpoint: str
    credential: Credential = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    proxy: TableProxy | None = None


def check_table(table: str, schedule: Schedule | None = None) -> None:
    """Check that the table is recognised and that the scheduled faults can be injected into it.

    Raises:
        UsageError: the table is not recognised, or table faults cannot be injected into it.
    """
    if table not in ("sqlite", "azurite") and not table.startswith(("https://", "http://")):
        raise UsageError(
            f"The table {table!r} is not recognised. Use 'sqlite' (a file in the run folder), 'azurite' (the "
            "emulator of Azure Storage) or the table URL of a storage account, such as "
            "https://<account>.table.core.windows.net."
        )
    if schedule is None or not schedule.disturbs_table:
        return
    connection = UserEnvironment.read().connection_string
    address = connection_endpoint(connection) if table == "azurite" and connection is not None else table
    if table == "sqlite" or address.startswith("https://"):
        tls = f"{address} is reached over TLS, which the proxy cannot intercept"
        reason = "the table is a local file" if table == "sqlite" else tls
        raise UsageError(
            f"The fault schedule has table faults ({schedule}), but {reason}. Use --table azurite, or leave these "
            "faults out."
        )


@contextlib.contextmanager
def open_table_choice(table: str, paths: Paths, schedule: Schedule | None = None) -> Iterator[TableChoice]:
    """Yield the table of a run, with its emulator and proxy running as long as the context.

    Args:
        table: ``sqlite``, ``azurite`` or the URL of a storage account, see :func:`check_table`.
        paths: files of the run.
        schedule: fault schedule; table faults put a proxy in front of the table.

    Raises:
        UsageError: the connection string in the environment names no table.
    """
    with contextlib.ExitStack() as stack:
        choice = stack.enter_context(_open(table, paths))
        if schedule is not None and schedule.disturbs_table:
            log = paths.run_dir / "table.jsonl"
            proxy = stack.enter_context(TableProxy(choice.endpoint, seed=schedule.seed, log=log))
            choice = _through(proxy, choice)
        yield choice


def _through(proxy: TableProxy, choice: TableChoice) -> TableChoice:
    """Return the table as reached through the proxy."""
    connection = choice.environment.get(CONNECTION_STRING) or UserEnvironment.read().connection_string
    secret = {}
    if choice.credential == "connection_string" and connection is not None:
        parts = _parts(connection)
        if "AccountName" in parts:
            parts |= {"DefaultEndpointsProtocol": "http", "TableEndpoint": proxy.endpoint}
            secret = {CONNECTION_STRING: "".join(f"{name}={value};" for name, value in parts.items())}
        else:
            secret = {CONNECTION_STRING: emulator_connection_string(proxy.endpoint)}
    return replace(choice, endpoint=proxy.endpoint, environment={**choice.environment, **secret}, proxy=proxy)


@contextlib.contextmanager
def _open(table: str, paths: Paths) -> Iterator[TableChoice]:
    connection = UserEnvironment.read().connection_string
    if table == "sqlite":
        yield TableChoice(str(paths.run_dir / SQLITE_TABLE))
    elif table != "azurite":
        yield TableChoice(table, "auto" if connection is None else "connection_string")
    elif connection is not None:
        yield TableChoice(connection_endpoint(connection), "connection_string")
    else:
        from azureml_elastic.local.azurite import Azurite

        with Azurite() as emulator:
            secret = {CONNECTION_STRING: emulator.connection_string}
            yield TableChoice(emulator.endpoint, "connection_string", secret)


def connection_endpoint(connection: str) -> str:
    """Return the table URL that a storage connection string names.

    Raises:
        UsageError: the connection string names no table endpoint.
    """
    parts = _parts(connection)
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return _EMULATOR_ENDPOINT
    if "TableEndpoint" in parts:
        return parts["TableEndpoint"]
    if "AccountName" in parts:
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        suffix = parts.get("EndpointSuffix", "core.windows.net")
        return f"{protocol}://{parts['AccountName']}.table.{suffix}"
    names = ", ".join(sorted(parts)) or "no settings"
    raise UsageError(
        f"The connection string in {CONNECTION_STRING} names no table endpoint: it has {names}, but neither "
        "TableEndpoint nor AccountName nor UseDevelopmentStorage=true. Correct or unset the variable."
    )


def _parts(connection: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in connection.split(";") if "=" in part)
