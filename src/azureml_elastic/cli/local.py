"""``azureml-elastic local``: runs a program on a cluster of local nodes, with faults injected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained, require
from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, ElasticResources, Recovery
from azureml_elastic.errors import UsageError

__all__ = ["check_program", "local", "parse_nodes"]

_MOST_NODES = 256


def local(
    program: Annotated[list[str], typer.Argument(help="The program and its arguments: train.py --epochs 3")],
    nodes: Annotated[
        str, typer.Option(help="How many nodes: MIN:MAX, or one number for both. MAX are started.", metavar="MIN:MAX")
    ] = "1:3",
    nproc_per_node: Annotated[int, typer.Option(help="Workers a node.")] = 1,
    chaos: Annotated[
        str | None,
        typer.Option(
            help="Faults to inject, or a file of them: kill=rank0@step:30,add@step:60,table=outage@20s/5s",
            metavar="SPEC|FILE",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the victims of faults whose target is 'any'.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="A new folder for the run's files; by default one below ./runs.")
    ] = None,
    table: Annotated[
        str, typer.Option(help="Where the nodes find each other.", metavar="sqlite|azurite|URL")
    ] = "sqlite",
    checkpoint_steps: Annotated[
        int | None, typer.Option(help="Steps between two checkpoints, besides the one every 10 seconds.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Write down each sample and prove that it was seen exactly once.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(help="Worker failures that the run may have.")] = 3,
    recovery: Annotated[
        Recovery, typer.Option(help="Whether workers are started anew when another one is lost, or stay.")
    ] = "restart",
    timeout: Annotated[float | None, typer.Option(help="Stop the run after this many seconds.")] = None,
    live: Annotated[
        bool | None, typer.Option("--live/--plain", help="A live table, or plain lines; by default what fits.")
    ] = None,
) -> None:
    """Run PROGRAM on local nodes that run the same code as on Azure ML.

    The run goes on when nodes are lost and grows when nodes are added; its report is in the run's folder.
    """
    with explained():
        counts = parse_nodes(nodes)
        if timeout is not None and timeout <= 0:
            raise UsageError(f"--timeout {timeout:g} is no time to run; give seconds above 0, or leave it out.")
        # What the models refuse is better refused before a folder is made.
        ElasticResources(min_instance_count=counts[0], max_instance_count=counts[1])
        distribution = ElasticDistribution(
            process_count_per_instance=nproc_per_node, max_restarts=max_restarts, recovery=recovery
        )
        CheckpointPolicy(every_steps=checkpoint_steps)
        check_program(program)
        require(("torch", "torch", "node"), ("psutil", "psutil", "node"))

        from rich.console import Console

        from azureml_elastic.local.cluster import LocalCluster
        from azureml_elastic.local.faults.schedule import load_schedule
        from azureml_elastic.local.table_choice import check_table
        from azureml_elastic.local.view import choose_view
        from azureml_elastic.report.terminal import summary

        schedule = load_schedule(chaos, seed) if chaos is not None else None
        check_table(table, schedule)
        console = Console()
        cluster = LocalCluster(
            counts,
            processes_per_node=nproc_per_node,
            chaos=schedule,
            run_dir=run_dir,
            table=table,
            checkpoint_steps=checkpoint_steps,
            audit=audit,
            max_restarts=max_restarts,
            distribution=distribution,
            timeout_s=timeout,
            view=choose_view(console, live=live),
        )
        report = cluster.run(program)
        console.print(summary(report))
    if report.exit_code == 0 and report.audit is not None and not report.audit.exactly_once:
        sys.exit(1)
    sys.exit(report.exit_code)


def parse_nodes(text: str) -> tuple[int, int]:
    """Read ``MIN:MAX``, or one number for both.

    Raises:
        UsageError: these are no node counts.
    """
    parts = text.split(":")
    try:
        counts = [int(part) for part in parts]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2):
        raise UsageError(f"--nodes {text!r} names no node counts. Give MIN:MAX such as 1:3, or one number for both.")
    minimum, maximum = counts[0], counts[-1]
    if minimum < 1 or maximum < 1:
        raise UsageError(f"--nodes {text!r} is below the limit of 1; a cluster has at least one node.")
    if minimum > maximum:
        raise UsageError(f"--nodes {text!r} has a minimum above its maximum; give {maximum}:{minimum}.")
    if maximum > _MOST_NODES:
        raise UsageError(f"--nodes {text!r} is above the limit of {_MOST_NODES} nodes on one machine; give fewer.")
    return minimum, maximum


def check_program(argv: list[str]) -> None:
    """Check that the words start a Python program that is there.

    Raises:
        CommandError: they do not.
    """
    from azureml_elastic.config.command.program import parse_program, require_script

    require_script(parse_program(argv))
