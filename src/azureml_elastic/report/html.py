"""The timeline of a run as a self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from azureml_elastic.errors import MissingExtra, UsageError
from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import RoundSpan

__all__ = ["figure", "write_html"]

_RANK0, _MEMBER, _LOSS = "#0b6aa2", "#7cb8dd", "#c0392b"


def write_html(report: Report, path: Path) -> None:
    """Write the page to a file, which is overwritten.

    Raises:
        MissingExtra: plotly is not installed.
        UsageError: the run has no rounds to show, or the file cannot be written.
    """
    picture = figure(report)
    try:
        path.write_text(picture.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page {path} cannot be written: {error}. Give another file with --html.") from error


def figure(report: Report) -> Any:
    """Return the chart: world size over time, and below it the nodes with their faults.

    Raises:
        MissingExtra: plotly is not installed.
        UsageError: the run has no rounds to show.
    """
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise MissingExtra("plotly", "report") from error
    rounds = [round_ for round_ in report.rounds if round_.ran]
    if not rounds:
        raise UsageError(
            f"No round of the run in {report.paths.run_dir} started its workers, so there is no timeline to show. "
            f"The nodes' output is in {report.paths.logs}."
        )
    start = min(round_.started for round_ in rounds)
    picture = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=("World size", "Nodes")
    )
    # The world size is a step function, 0 between two rounds.
    times = [time - start for round_ in rounds for time in (round_.started, max(round_.started, round_.ended))]
    sizes = [size for round_ in rounds for size in (round_.world_size, 0)]
    picture.add_trace(
        graph_objects.Scatter(
            x=times, y=sizes, mode="lines", fill="tozeroy", line={"shape": "hv", "color": _RANK0}, name="workers"
        ),
        row=1,
        col=1,
    )
    _add_lives(graph_objects, picture, rounds, start)
    _add_losses(graph_objects, picture, report, start)
    picture.update_xaxes(title_text="seconds", row=2, col=1)
    picture.update_yaxes(rangemode="tozero", dtick=max(1, max(sizes) // 8), row=1, col=1)
    names = [node.name for node in report.nodes] or list(dict.fromkeys(n for r in rounds for n in r.members))
    picture.update_yaxes(categoryorder="array", categoryarray=names[::-1], row=2, col=1)
    picture.update_layout(title=_title(report), barmode="overlay", template="plotly_white", showlegend=False)
    return picture


def _title(report: Report) -> str:
    sizes = " → ".join(map(str, report.world_sizes))
    audit = ""
    if report.audit is not None:
        audit = "each sample exactly once" if report.audit.exactly_once else "samples missed or repeated"
    parts = (f"run {report.run_id}".strip(), report.outcome, f"{report.last_step} steps", sizes, audit)
    return " · ".join(part for part in parts if part)


def _add_lives(graph_objects: Any, picture: Any, rounds: list[RoundSpan], start: float) -> None:
    bars = [(round_, rank, node) for round_ in rounds for rank, node in enumerate(round_.members)]
    picture.add_trace(
        graph_objects.Bar(
            orientation="h",
            y=[node for _, _, node in bars],
            base=[round_.started - start for round_, _, _ in bars],
            x=[max(round_.ended - round_.started, 0.01) for round_, _, _ in bars],
            marker={"color": [_RANK0 if rank == 0 else _MEMBER for _, rank, _ in bars], "line": {"width": 1}},
            hovertext=[
                f"round {round_.number}, rank {rank}, steps {round_.first_step} to {round_.last_step}<br>"
                f"ended: {round_.reason}"
                for round_, rank, _ in bars
            ],
            hoverinfo="text",
        ),
        row=2,
        col=1,
    )


def _add_losses(graph_objects: Any, picture: Any, report: Report, start: float) -> None:
    """Mark the injected faults, or without these the losses that ended a round."""
    marks = [(fault.time, node, fault.fault) for fault in report.faults for node in fault.nodes]
    if not marks:
        marks = [(round_.ended, node, round_.reason) for round_ in report.rounds for node in round_.lost]
    picture.add_trace(
        graph_objects.Scatter(
            x=[time - start for time, _, _ in marks],
            y=[node for _, node, _ in marks],
            mode="markers",
            marker={"symbol": "x", "size": 11, "color": _LOSS},
            hovertext=[text for _, _, text in marks],
            hoverinfo="text",
        ),
        row=2,
        col=1,
    )
