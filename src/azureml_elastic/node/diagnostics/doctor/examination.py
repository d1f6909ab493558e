"""All that is looked at, in the order in which one thing depends on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from azureml_elastic.config import TableRendezvous
from azureml_elastic.errors import ElasticError, UsageError
from azureml_elastic.node.diagnostics.doctor.here import check_machine, check_packages
from azureml_elastic.node.diagnostics.doctor.hosts import check_host, check_peer
from azureml_elastic.node.diagnostics.health.findings import Finding

__all__ = ["NODE_COMMAND", "examine", "failed", "text_of"]

NODE_COMMAND = "python -m azureml_elastic.node.diagnostics.doctor"
"""The command of a job that examines its nodes."""


def examine(
    rendezvous: TableRendezvous,
    environ: Mapping[str, str],
    peers: Sequence[tuple[str, int]] = (),
    nowhere: str = "",
) -> Iterator[Finding]:
    """Yield what is found, one thing after the other.

    Args:
        rendezvous: whose table, address and ports are looked at.
        environ: of the process, with the variables that name the workspace.
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
    from azureml_elastic.node.diagnostics.doctor.accounts import Account, find_account, named_account
    from azureml_elastic.node.diagnostics.doctor.identities import check_identity
    from azureml_elastic.node.diagnostics.doctor.tables import check_table

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
