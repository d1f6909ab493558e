"""Commands about local clusters: ``local`` and ``demo``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import explained, require
from azureml_elastic.config import (
    CheckpointPolicy,
    ElasticDistribution,
    ElasticResources,
    Framework,
    MetricsPolicy,
    Plan,
    Recovery,
)
from azureml_elastic.config.base import positive_duration
from azureml_elastic.errors import ElasticError, UsageError
from azureml_elastic.local.faults.model import MOST_NODES
from azureml_elastic.local.node_start import StartMethod

if TYPE_CHECKING:
    from rich.console import Console

RunFolder = Annotated[Path | None, typer.Option(help="A new folder for the run's files; by default one below ./runs.")]
LiveOption = Annotated[
    bool | None,
    typer.Option("--live/--plain", help="A live table, or plain lines; by default what the terminal supports."),
]


@explained()
def local(
    program: Annotated[list[str], typer.Argument(help="The program and its arguments: train.py --epochs 3")],
    nodes: Annotated[
        str, typer.Option(help="Number of nodes: MIN:MAX, or one number for both. MAX are started.", metavar="MIN:MAX")
    ] = "1:3",
    nproc_per_node: Annotated[int, typer.Option(help="Workers per node.")] = 1,
    nodes_per_replica: Annotated[
        str, typer.Option(help="Nodes that hold one copy of a model that is sharded on run.mesh().", metavar="N|all")
    ] = "1",
    chaos: Annotated[
        str | None,
        typer.Option(
            help="Faults to inject, or a file of them: kill=rank0@step:30,add@step:60,table=outage@20s/5s",
            metavar="SPEC|FILE",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for the choice of victims of faults whose target is 'any'.")] = 0,
    run_dir: RunFolder = None,
    table: Annotated[str, typer.Option(help="Table of the rendezvous.", metavar="sqlite|azurite|URL")] = "sqlite",
    checkpoint_every_steps: Annotated[
        int | None, typer.Option(help="Steps between two checkpoints, besides the one every 10 seconds.")
    ] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            help="Folder of an earlier run, possibly a failed one, from whose last checkpoint this run starts.",
            metavar="RUN_DIR",
        ),
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Record each sample, and verify that each was trained exactly once.")
    ] = False,
    tensorboard: Annotated[
        str | None, typer.Option(help="Folder for TensorBoard's files with the run's metrics.", metavar="FOLDER")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Worker failures that the run may have.")] = 3,
    recovery: Annotated[
        Recovery, typer.Option(help="Whether the loss of a worker restarts the others, or they keep their processes.")
    ] = "restart",
    framework: Annotated[
        Framework, typer.Option(help="What a round runs: PROGRAM as all workers, or an engine's cluster that it uses.")
    ] = "pytorch",
    start: Annotated[
        StartMethod,
        typer.Option(
            help="Whether several nodes are forked from one process that has made the program's imports, where that is "
            "possible, or each is started by its command, as on a machine of its own."
        ),
    ] = "fork",
    timeout: Annotated[
        str | None, typer.Option(help="Stop the run after this time, as in 90s or 10m.", metavar="DURATION")
    ] = None,
    live: LiveOption = None,
) -> None:
    """Run PROGRAM on local nodes that run the same code as on Azure ML.

    The run continues when nodes are lost and grows when nodes are added; its report is in the run's folder.
    """
    from azureml_elastic.local.run_end import command_exit_code
    from azureml_elastic.program.command import parse_program, require_script

    counts = parse_nodes(nodes)
    if counts[1] > MOST_NODES:
        raise UsageError(f"--nodes {nodes!r} is above the limit of {MOST_NODES} nodes on one machine; give fewer.")
    limit = None if timeout is None else positive_duration("--timeout", timeout)
    # Invalid options are refused before a folder is created.
    distribution = ElasticDistribution(
        process_count_per_instance=nproc_per_node,
        nodes_per_replica=nodes_per_replica,  # type: ignore[arg-type]  # a text of a number is taken, too
        max_restarts=max_restarts,
        recovery=recovery,
        framework=framework,
    )
    Plan(
        resources=ElasticResources(min_instance_count=counts[0], max_instance_count=counts[1]),
        distribution=distribution,
    )
    checkpoint = CheckpointPolicy(every_steps=checkpoint_every_steps)
    require_script(parse_program(program))
    require(("torch", "torch", "node"), ("psutil", "psutil", "node"))

    from rich.console import Console

    from azureml_elastic.local.azurite import check_table
    from azureml_elastic.local.cluster import LocalCluster, new_run_dir
    from azureml_elastic.local.faults.schedule import load_schedule
    from azureml_elastic.local.view import choose_view
    from azureml_elastic.report.terminal import summary

    run_dir = run_dir or new_run_dir()
    schedule = load_schedule(chaos, seed) if chaos is not None else None
    check_table(table, schedule)
    console = Console()
    cluster = LocalCluster(
        counts,
        chaos=schedule,
        run_dir=run_dir,
        table=table,
        checkpoint=checkpoint,
        resume_from=resume_from,
        audit=audit,
        metrics=MetricsPolicy(tensorboard=tensorboard),
        distribution=distribution,
        start=start,
        timeout=limit,
        view=choose_view(console, live=live),
    )
    with named_folder(console, run_dir, program):
        result = cluster.run(program)
    console.print(summary(result))
    if result.outcome != "succeeded":
        say_how_to_go_on(run_dir, program)
    sys.exit(command_exit_code(result))


@contextlib.contextmanager
def named_folder(console: Console, run_dir: Path, program: Sequence[str] = ("PROGRAM",)) -> Iterator[None]:
    """Name the folder of a run at its start, and again when a signal ends it, with how to continue it."""
    console.print(f"files: {run_dir}", soft_wrap=True, highlight=False, markup=False)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"azureml-elastic: files: {run_dir}", err=True)
        say_how_to_go_on(run_dir, program)
        raise


def say_how_to_go_on(run_dir: Path, program: Sequence[str] = ("PROGRAM",)) -> None:
    """Print the command that continues a run from its last checkpoint, if it has one."""
    from azureml_elastic.local.cluster import find_earlier_run

    with contextlib.suppress(ElasticError):  # it has no checkpoint
        find_earlier_run(run_dir)
        continued = f"azureml-elastic local --resume-from {shlex.quote(str(run_dir))} {shlex.join(program)}"
        typer.echo(f"azureml-elastic: to continue from its last checkpoint: {continued}", err=True)


@explained()
def demo(run_dir: RunFolder = None, live: LiveOption = None) -> None:
    """Train on real handwritten digits with 3 local nodes, lose rank 0's node, add a node, and verify the result."""
    require(("torch", "torch", "node"), ("psutil", "psutil", "node"), ("sklearn", "scikit-learn", "demo"))

    from rich.console import Console

    from azureml_elastic.local.cluster import new_run_dir
    from azureml_elastic.local.demo import PROGRAM, run_demo
    from azureml_elastic.local.view import choose_view
    from azureml_elastic.report.terminal import audit_text, timeline_picture

    console = Console()
    console.print(
        "Three nodes learn handwritten digits. At step 35 the node of rank 0 is killed, at step 60 a new one comes. "
        "On a busy machine both come later, and the nodes train on until the new one has joined."
    )
    run_dir = run_dir or new_run_dir()
    with named_folder(console, run_dir, PROGRAM):
        result = run_demo(run_dir, choose_view(console, live=live))
    if result.report.rounds:
        console.print(timeline_picture(result.report))
    if result.report.audit is not None:
        console.print(audit_text(result.report.audit))
    if result.accuracy is not None:
        console.print(f"accuracy on held-out digits: {result.accuracy:.1%}", highlight=False)
    for recovery in result.report.recoveries:
        console.print(f"training resumed {recovery.seconds:.1f} s after the loss of {', '.join(recovery.lost)}")
    for doubt in result.doubts:
        console.print(doubt, style="red", markup=False)
    console.print(f"files: {result.report.paths.run_dir}", soft_wrap=True, highlight=False)
    if result.report.outcome != "succeeded":
        say_how_to_go_on(run_dir, PROGRAM)
    if result.doubts:
        raise typer.Exit(1)


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse ``MIN:MAX``, or one number for both."""
    try:
        minimum, *others = (int(part) for part in text.split(":"))
        (maximum,) = others or [minimum]
    except ValueError:
        raise UsageError(
            f"--nodes {text!r} names no node counts. Give MIN:MAX such as 1:3, or one number for both."
        ) from None
    if minimum < 1 or maximum < 1:
        raise UsageError(f"--nodes {text!r} is below the limit of 1; a run has at least one node.")
    if minimum > maximum:
        raise UsageError(f"--nodes {text!r} has a minimum above its maximum; give {maximum}:{minimum}.")
    return minimum, maximum
