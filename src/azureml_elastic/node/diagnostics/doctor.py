"""``python -m azureml_elastic.node.diagnostics.doctor``: check whether this machine can take part in a run.

As the command of an elastic job it runs on each node instead of training. Exit codes: 0 a run would work, 1 a run would
fail, 2 the options or the plan in the environment are not usable.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import ValidationError

from azureml_elastic.config import Credential, Plan, TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError, UsageError
from azureml_elastic.node.diagnostics.checks.machine import check_machine, check_packages
from azureml_elastic.node.diagnostics.checks.network import check_host, check_peer
from azureml_elastic.node.diagnostics.findings import DiagnosticReport, Finding

NODE_COMMAND = "python -m azureml_elastic.node.diagnostics.doctor"
"""Command of a job that checks its nodes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine and return the exit code; ``None`` means the arguments of the process."""
    parser = argparse.ArgumentParser(
        prog=NODE_COMMAND,
        description="Check whether this machine can take part in a run: account, role, endpoints, address, ports. "
        "With a plan in the environment, the plan's rendezvous is checked.",
    )
    parser.add_argument("--endpoint", help="table URL of a storage account; by default that of the job's workspace")
    parser.add_argument("--table", help="name of the table")
    parser.add_argument("--credential", choices=get_args(Credential), help="credential for the table")
    parser.add_argument("--client-id", help="client id of a user-assigned managed identity")
    parser.add_argument("--port-range", help="ports for peers, such as 29400-29500")
    parser.add_argument("--advertise", help="interface, range or address at which peers reach this machine")
    parser.add_argument("--peer", action="append", default=[], help="host:port of another node; may be repeated")
    options = vars(parser.parse_args(argv))
    # What it would log of failed requests is among the findings, with advice.
    logging.getLogger("azure").setLevel(logging.CRITICAL)
    try:
        peers = [read_peer(text) for text in options.pop("peer")]
        environment = NodeEnvironment.read()
        plan = None if environment.plan is None else Plan.from_json(environment.plan)
        rendezvous = make_rendezvous(plan.rendezvous if plan else TableRendezvous(), **options)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = DiagnosticReport(tuple(examine(rendezvous, environment, peers)))
    print(report.text(), flush=True)
    return 1 if report.failed else 0


def make_rendezvous(base: TableRendezvous, *, port_range: str | None = None, **options: Any) -> TableRendezvous:
    """Return a rendezvous with the options of the command line; ``None`` keeps a field.

    Raises:
        UsageError: a value is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if port_range is not None:
        low, _, high = port_range.partition("-")
        if not (low.isdigit() and high.isdigit()):
            raise UsageError(f"{port_range!r} is no range of ports. Give for example 29400-29500.")
        given["port_range"] = (int(low), int(high))
    try:
        return TableRendezvous.model_validate({**dict(base), **given})
    except ValidationError as error:
        raise UsageError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from error


def read_peer(text: str) -> tuple[str, int]:
    """Parse a host and a port, such as ``10.0.0.5:29400`` or ``[fd00::5]:29400``.

    Raises:
        UsageError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{text!r} is no host and port. Give for example 10.0.0.5:29400, or [fd00::5]:29400.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def examine(
    rendezvous: TableRendezvous,
    environment: NodeEnvironment,
    peers: Sequence[tuple[str, int]] = (),
    no_workspace: str = "",
) -> Iterator[Finding]:
    """Yield the findings, one after the other.

    Args:
        no_workspace: reason why no workspace is known, for the finding; replaces the general one.
    """
    packages = list(check_packages())
    yield from packages
    if packages[0].status == "ok":
        yield from _check_account(rendezvous, environment, no_workspace)
        yield from check_machine(rendezvous, environment)
    for host, port in peers:
        yield check_peer(host, port)


def _check_account(rendezvous: TableRendezvous, environment: NodeEnvironment, no_workspace: str) -> Iterator[Finding]:
    """Check the identity, the storage account and the table; needs Azure's packages."""
    from azureml_elastic.node.azure.workspace import cloud_of, workspace_of
    from azureml_elastic.node.diagnostics.checks.workspace import Account, check_identity, check_table, find_account

    endpoint, account = rendezvous.endpoint, None
    if endpoint is None:
        try:
            workspace, cloud = workspace_of(environment), cloud_of(environment)
        except UsageError as error:
            advice = (
                "Give --subscription, --resource-group and --workspace-name before the command, or --endpoint."
                if no_workspace
                else ""
            )
            yield Finding("workspace", "fail", no_workspace or str(error), "", advice)
            return
        yield check_host("resource manager", cloud.arm_url, environment)
    identity, finding = check_identity(rendezvous, environment)
    yield finding
    if finding.status == "fail":
        return
    if endpoint is None and identity is not None and identity.login.token is not None:
        account = yield from find_account(workspace, identity, cloud)
        if account is None:
            return
        rendezvous = rendezvous.model_copy(update={"endpoint": account.url})
    scheme = urlsplit(rendezvous.endpoint or "").scheme
    if scheme == "https" and account is None:
        account = Account(str(endpoint).rstrip("/"))
    if scheme in ("http", "https"):
        yield check_host("table service", str(rendezvous.endpoint), environment)
    try:
        yield from check_table(rendezvous, environment, account, identity)
    except ElasticError as error:
        yield Finding("table", "fail", str(error))


if __name__ == "__main__":
    sys.exit(main())
