"""Check of the table: each operation of a run, once, with its duration."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta

from azureml_elastic.config import TableRendezvous
from azureml_elastic.errors import ElasticError, RowChanged, TableForbidden, TableNotFound
from azureml_elastic.node.diagnostics.checks.account import Account
from azureml_elastic.node.diagnostics.checks.identity import CallerIdentity, refusal_code, why_refused
from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.table import Table, open_table

__all__ = ["check_table"]

_KEY = "doctor"
_SLOW_SECONDS = 1.0


class _WrongResultError(Exception):
    """An operation had a wrong result."""


def check_table(
    rendezvous: TableRendezvous, environ: Mapping[str, str], account: Account | None, identity: CallerIdentity | None
) -> Iterator[Finding]:
    """Create the table if it is missing, and insert, read, replace and delete a row.

    Args:
        rendezvous: rendezvous settings with the endpoint.
        environ: environment variables of the process.
        account: storage account of the table, ``None`` for an emulator or a file.
        identity: identity that opens the table, ``None`` if none is needed.
    """
    tables: list[Table] = []
    etags: list[str] = []

    def open_() -> None:
        run = f"doctor-{secrets.token_hex(6)}"
        tables.append(open_table(rendezvous, run, environ, timeout=timedelta(0)))

    def insert() -> None:
        etags.append(tables[0].insert(_KEY, {"step": 1}))

    def read() -> None:
        row = tables[0].get(_KEY)
        if row is None or row.value != {"step": 1}:
            raise _WrongResultError(f"read {row.value if row else 'nothing'} back")

    def replace_row() -> None:
        etags.append(tables[0].replace(_KEY, {"step": 2}, etags[0]))

    def replace_outdated() -> None:
        try:
            tables[0].replace(_KEY, {"step": 3}, etags[0])
        except RowChanged:
            return
        raise _WrongResultError("a row was replaced although its version was outdated")

    def delete() -> None:
        tables[0].delete(_KEY, etags[1])
        if tables[0].get(_KEY) is not None:
            raise _WrongResultError("a deleted row is there still")

    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("open or make it", open_),
        ("insert a row", insert),
        ("read it", read),
        ("replace this version", replace_row),
        ("an old version is refused", replace_outdated),
        ("delete it", delete),
    )
    try:
        for what, step in steps:
            finding = _timed(f"table: {what}", step, account, identity)
            if step is open_ and finding.status != "fail":
                finding = replace(finding, value=f"{finding.value}, {rendezvous.table}")
            yield finding
            if finding.status == "fail":
                return
    finally:
        for table in tables:
            table.close()


def _timed(
    name: str, operation: Callable[[], None], account: Account | None, identity: CallerIdentity | None
) -> Finding:
    began = time.monotonic()
    try:
        operation()
    except _WrongResultError as error:
        advice = "Runs cannot rely on this table. Is a proxy or an old emulator in between?"
        return Finding(name, "fail", str(error), "", advice)
    except TableForbidden as error:
        if account is None:
            return Finding(name, "fail", str(error))
        code = refusal_code(error)
        login = identity.login.name if identity is not None else "the login"
        problem = f"{account.url} refuses {login}: {code}" if code else str(error)
        assignee = identity.assignee if identity is not None else CallerIdentity.UNKNOWN
        return Finding(name, "fail", problem, "", why_refused(code, assignee, account.name, account.id))
    except ElasticError as error:
        advice = "See the line about the table service." if isinstance(error, TableNotFound) else ""
        return Finding(name, "fail", str(error), "", advice)
    seconds = time.monotonic() - began
    slow = seconds > _SLOW_SECONDS
    advice = "A slow table delays the start and every change of a run. Is the account in the nodes' region?"
    return Finding(name, "warn" if slow else "ok", f"{seconds * 1000:.0f} ms", "", advice if slow else "")
