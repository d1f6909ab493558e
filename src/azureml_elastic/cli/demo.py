"""``azureml-elastic demo``: shows in a minute that a run survives the loss of its most important node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained, require

__all__ = ["demo"]


def demo(
    run_dir: Annotated[
        Path | None, typer.Option(help="A new folder for the run's files; by default one below ./runs.")
    ] = None,
    live: Annotated[
        bool | None, typer.Option("--live/--plain", help="A live table, or plain lines; by default what fits.")
    ] = None,
) -> None:
    """Train on real handwritten digits with 3 local nodes, lose rank 0's node, get a new one, and prove the result."""
    with explained():
        require(("torch", "torch", "node"), ("psutil", "psutil", "node"), ("sklearn", "scikit-learn", "demo"))

        from rich.console import Console

        from azureml_elastic.local.demo import run_demo
        from azureml_elastic.local.view import choose_view
        from azureml_elastic.report.terminal import audit_text, timeline_picture

        console = Console()
        console.print(
            "Three nodes learn handwritten digits. At step 35 the node of rank 0 is killed, at step 60 a new one comes."
        )
        result = run_demo(run_dir, choose_view(console, live=live))
        if result.report.rounds:
            console.print(timeline_picture(result.report))
        if result.report.audit is not None:
            console.print(audit_text(result.report.audit))
        if result.accuracy is not None:
            console.print(f"accuracy on held-out digits: {result.accuracy:.1%}", highlight=False)
        for recovery in result.report.recoveries:
            console.print(f"back at work {recovery.seconds:.1f} s after the loss of {', '.join(recovery.lost)}")
        for doubt in result.doubts:
            console.print(doubt, style="red", markup=False)
        console.print(f"files: {result.report.paths.run_dir}", soft_wrap=True, highlight=False)
    if result.doubts:
        raise typer.Exit(1)
