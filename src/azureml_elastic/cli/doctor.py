"""``azureml-elastic doctor``: finds out why nodes do not reach the table or each other, and recommends steps."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained
from azureml_elastic.cli.output import JsonOption, console_beside, write_json
from azureml_elastic.cli.workspaces import current_workspace
from azureml_elastic.errors import UsageError


@explained()
def doctor(
    endpoint: Annotated[
        str | None, typer.Option(help="Table URL of a storage account, or a path; else that of the workspace.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Name of the table.")] = None,
    credential: Annotated[
        str | None, typer.Option(help="auto, managed_identity, on_behalf_of, connection_string or developer.")
    ] = None,
    client_id: Annotated[str | None, typer.Option(help="Client ID of a user-assigned managed identity.")] = None,
    port_range: Annotated[str | None, typer.Option(help="Ports for peers, such as 29400-29500.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Interface, range or address at which peers reach this machine.")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="host:port of another node; may be repeated.")] = None,
    node: Annotated[
        bool, typer.Option("--node", help="Run within a job: workspace and plan are taken from its variables only.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check the storage account, the role, the endpoints, and how peers reach this machine.

    The workspace is that of config.json, of the variables of Azure ML, or of the options. Exits with 1 if a run would
    fail, and says what to do.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from azureml_elastic.config import Plan, TableRendezvous
    from azureml_elastic.environment.node import NodeEnvironment
    from azureml_elastic.node.diagnostics.doctor import NODE_COMMAND, examine, make_rendezvous, read_peer
    from azureml_elastic.node.diagnostics.findings import DiagnosticReport

    logging.getLogger("azure").setLevel(logging.CRITICAL)
    environment = NodeEnvironment.read()
    plan = Plan.from_json(environment.plan) if node and environment.plan else None
    rendezvous = make_rendezvous(
        plan.rendezvous if plan else TableRendezvous(),
        endpoint=endpoint,
        table=table,
        credential=credential,
        client_id=client_id,
        port_range=port_range,
        advertise=advertise,
    )
    peers = [read_peer(text) for text in peer or ()]
    nowhere = ""
    if rendezvous.endpoint is None and not node:
        try:
            environment = environment.with_variables(current_workspace().variables)
        except UsageError as error:
            nowhere = str(error)
    console = console_beside(json)
    with Console(stderr=True).status("Looking ..."):
        report = DiagnosticReport(tuple(examine(rendezvous, environment, peers, nowhere)))
    shown = Table("what", "", Column("found", overflow="fold"), box=None, pad_edge=False, header_style="bold")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in report.findings:
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        shown.add_row(finding.name, status, escape(finding.found))
    console.print(shown)
    steps = [finding for finding in report.findings if finding.advice and finding.status != "ok"]
    if steps:
        console.print("\nWhat to do", style="bold")
    for finding in steps:
        console.print(f"{finding.name}: {finding.advice}", markup=False, highlight=False, soft_wrap=True)
    if not node:
        hint = f"\nThe same from the nodes: submit the job with its command replaced by `{NODE_COMMAND}`."
        console.print(hint, style="dim", markup=False, highlight=False, soft_wrap=True)
    write_json({"version": 1, "status": report.status, "findings": [vars(each) for each in report.findings]}, json)
    if report.failed:
        raise typer.Exit(1)
