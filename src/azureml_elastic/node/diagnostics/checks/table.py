"""The table itself: everything that a run does with it, once, each call with the time that it took."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from azureml_elastic.config import TableRendezvous
from azureml_elastic.errors import ElasticError, RowChanged, TableForbidden, TableNotFound
from azureml_elastic.node.diagnostics.checks.account import Account
from azureml_elastic.node.diagnostics.checks.identity import CallerIdentity
from azureml_elastic.node.diagnostics.checks.roles import refusal_code, why_refused
from azureml_elastic.node.diagnostics.findings import Finding
from azureml_elastic.node.table import Table, open_table

__all__ = ["check_table"]

_KEY = "doctor"
_SLOW_SECONDS = 1.0


class _WrongError(Exception):
    """The service has done something else than it should have."""


def check_table(
    rendezvous: TableRendezvous, environ: Mapping[str, str], account: Account | None, identity: CallerIdentity | None
) -> Iterator[Finding]:
    """Make the table where it is missing, and write, read, replace and delete a row, as a run does.

    Args:
        rendezvous: rendezvous settings with the endpoint.
        environ: environment variables of the process.
        account: that holds the table, ``None`` where it is none of Azure's.
        identity: that asks, ``None`` where none is needed.
    """
    began = time.monotonic()
    run = f"doctor-{secrets.token_hex(6)}"
    try:
        table = open_table(rendezvous, run, environ, timeout=timedelta(0))
    except ElasticError as error:
        yield _refused("open or make it", error, account, identity)
        return
    yield _took("open or make it", began, f", {rendezvous.table}")
    try:
        yield from _round_trip(table, account, identity)
    finally:
        table.close()


def _round_trip(table: Table, account: Account | None, identity: CallerIdentity | None) -> Iterator[Finding]:
    etags: list[str] = []

    def insert() -> None:
        etags.append(table.insert(_KEY, {"step": 1}))

    def read() -> None:
        row = table.get(_KEY)
        if row is None or row.value != {"step": 1}:
            raise _WrongError(f"read {row.value if row else 'nothing'} back")

    def replace() -> None:
        etags.append(table.replace(_KEY, {"step": 2}, etags[0]))

    def stale() -> None:
        try:
            table.replace(_KEY, {"step": 3}, etags[0])
        except RowChanged:
            return
        raise _WrongError("a row was replaced although its version was outdated")

    def delete() -> None:
        table.delete(_KEY, etags[1])
        if table.get(_KEY) is not None:
            raise _WrongError("a deleted row is there still")

    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("insert a row", insert),
        ("read it", read),
        ("replace this version", replace),
        ("an old version is refused", stale),
        ("delete it", delete),
    )
    for what, step in steps:
        began = time.monotonic()
        try:
            step()
        except ElasticError as error:
            yield _refused(what, error, account, identity)
            return
        except _WrongError as error:
            advice = "Runs cannot rely on this table. Is a proxy or an old emulator in between?"
            yield Finding(f"table: {what}", "fail", str(error), "", advice)
            return
        yield _took(what, began)


def _took(what: str, began: float, more: str = "") -> Finding:
    seconds = time.monotonic() - began
    slow = seconds > _SLOW_SECONDS
    advice = "Runs start and re-form at the table's pace. Is the account in the nodes' region?" if slow else ""
    return Finding(f"table: {what}", "warn" if slow else "ok", f"{seconds * 1000:.0f} ms{more}", "", advice)


def _refused(what: str, error: ElasticError, account: Account | None, identity: CallerIdentity | None) -> Finding:
    name = f"table: {what}"
    if isinstance(error, TableForbidden) and account is not None:
        code = refusal_code(error)
        asks = identity.login.name if identity is not None else "the login"
        said = f"{account.url} refuses {asks}: {code}" if code else str(error)
        who = identity.assignee if identity is not None else "<object id of the identity>"
        return Finding(name, "fail", said, "", why_refused(code, who, account.name, account.id))
    advice = "See the line about the table service." if isinstance(error, TableNotFound) else ""
    return Finding(name, "fail", str(error), "", advice)
