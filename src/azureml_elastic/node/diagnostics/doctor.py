"""``python -m azureml_elastic.node.diagnostics.doctor``: examine this machine, and print what was found.

As the command of an elastic job it runs on each node instead of training. Exit codes: 0 a run would work from here, 1
it would not, 2 the options or the plan in the environment cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import ValidationError

from azureml_elastic.config import Credential, Plan, TableRendezvous
from azureml_elastic.config import environment as variables
from azureml_elastic.errors import ElasticError, UsageError
from azureml_elastic.node.diagnostics.checks.endpoints import check_host, check_peer
from azureml_elastic.node.diagnostics.checks.installation import check_machine, check_packages
from azureml_elastic.node.diagnostics.findings import Finding

__all__ = ["NODE_COMMAND", "examine", "failed", "main", "make_rendezvous", "read_peer", "read_ports", "text_of"]

NODE_COMMAND = "python -m azureml_elastic.node.diagnostics.doctor"
"""The command of a job that examines its nodes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine and return the exit code.

    Args:
        argv: the arguments without the program's name; ``None`` takes the process's own.
    """
    parser = argparse.ArgumentParser(
        prog=NODE_COMMAND,
        description="Examine whether this machine can take part in a run: account, role, endpoints, address, ports. "
        "Where the environment holds a plan, its rendezvous is examined.",
    )
    parser.add_argument("--endpoint", help="table URL of a storage account; else that of the job's workspace")
    parser.add_argument("--table", help="name of the table")
    parser.add_argument("--credential", choices=get_args(Credential), help="which identity opens the table")
    parser.add_argument("--client-id", help="of a user-assigned managed identity")
    parser.add_argument("--port-range", help="ports for peers, such as 29400-29500")
    parser.add_argument("--advertise", help="interface, range or address at which peers reach this machine")
    parser.add_argument("--peer", action="append", default=[], help="host:port of another node; may be repeated")
    arguments = parser.parse_args(argv)
    logging.getLogger("azure").setLevel(logging.CRITICAL)
    try:
        plan = Plan.from_json(os.environ[variables.PLAN]) if os.environ.get(variables.PLAN) else None
        given = {name: value for name, value in vars(arguments).items() if name != "peer"}
        rendezvous = make_rendezvous(plan.distribution.rendezvous if plan else TableRendezvous(), **given)
        peers = [read_peer(text) for text in arguments.peer]
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    findings = list(examine(rendezvous, os.environ, peers))
    print(text_of(findings), flush=True)
    return 1 if failed(findings) else 0


def make_rendezvous(base: TableRendezvous, *, port_range: str | None = None, **options: Any) -> TableRendezvous:
    """Return a rendezvous with what the command line says; ``None`` says nothing.

    Raises:
        UsageError: a value is wrong.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if port_range is not None:
        given["port_range"] = read_ports(port_range)
    try:
        return TableRendezvous.model_validate({**dict(base), **given})
    except ValidationError as error:
        raise UsageError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from error


def read_ports(text: str) -> tuple[int, int]:
    """Read a range of ports such as ``29400-29500``.

    Raises:
        UsageError: it is none.
    """
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit()):
        raise UsageError(f"{text!r} is no range of ports. Give for example 29400-29500.")
    return int(low), int(high)


def read_peer(text: str) -> tuple[str, int]:
    """Read a host and a port, such as ``10.0.0.5:29400`` or ``[fd00::5]:29400``.

    Raises:
        UsageError: it is none.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise UsageError(f"{text!r} is no host and port. Give for example 10.0.0.5:29400, or [fd00::5]:29400.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def examine(
    rendezvous: TableRendezvous,
    environ: Mapping[str, str],
    peers: Sequence[tuple[str, int]] = (),
    nowhere: str = "",
) -> Iterator[Finding]:
    """Yield what is found, one thing after the other.

    Args:
        rendezvous: whose table, address and ports are looked at.
        environ: environment variables of the process, including those that name the workspace.
        peers: hosts and ports of other nodes.
        nowhere: why no workspace is named, where the caller knows more about it.
    """
    packages = list(check_packages())
    yield from packages
    if packages[0].status == "ok":
        yield from _outside(rendezvous, environ, nowhere)
        yield from check_machine(rendezvous, environ)
    for host, port in peers:
        yield check_peer(host, port)


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether a run would fail from this machine."""
    return any(finding.status == "fail" for finding in findings)


def text_of(findings: Sequence[Finding]) -> str:
    """Return the findings as lines, for a log."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        indent = " " * (width + 8)
        wanted = f" (wanted: {finding.limit})" if finding.limit and finding.status != "ok" else ""
        lines.append(f"{finding.name.ljust(width)}  {finding.status.ljust(4)}  {finding.value}{wanted}")
        if finding.advice and finding.status != "ok":
            lines.append(f"{indent}{finding.advice}")  # commands stay in one piece, to be copied
    return "\n".join(lines)


def _outside(rendezvous: TableRendezvous, environ: Mapping[str, str], nowhere: str) -> Iterator[Finding]:
    """Yield what is found about the account and its table."""
    from azureml_elastic.node.azure.clouds import cloud_of
    from azureml_elastic.node.azure.workspace import workspace_of
    from azureml_elastic.node.diagnostics.checks.account import Account, find_account, named_account
    from azureml_elastic.node.diagnostics.checks.identity import check_identity
    from azureml_elastic.node.diagnostics.checks.table import check_table

    endpoint = rendezvous.endpoint
    scheme = urlsplit(endpoint).scheme if endpoint is not None and "://" in endpoint else ""
    account: Account | None = None
    if endpoint is None:
        try:
            workspace, cloud = workspace_of(environ), cloud_of(environ)
        except UsageError as error:
            advice = "Give --subscription, --resource-group and --workspace, or --endpoint." if nowhere else ""
            yield Finding("workspace", "fail", nowhere or str(error), "", advice)
            return
        yield check_host("resource manager", cloud.arm_url, environ)
        identity, finding = check_identity(rendezvous, environ)
        yield finding
        if identity is None:
            return
        if identity.login.token is not None:
            account = yield from find_account(workspace, identity, cloud)
            if account is None:
                return
            rendezvous = rendezvous.model_copy(update={"endpoint": account.url})
    else:
        identity, finding = check_identity(rendezvous, environ)
        yield finding
        if finding.status == "fail":
            return
        account = named_account(endpoint) if scheme == "https" else None
    if rendezvous.endpoint is not None and urlsplit(rendezvous.endpoint).scheme in ("http", "https"):
        yield check_host("table service", rendezvous.endpoint, environ)
    try:
        yield from check_table(rendezvous, environ, account, identity)
    except ElasticError as error:
        yield Finding("table", "fail", str(error))


if __name__ == "__main__":
    sys.exit(main())
