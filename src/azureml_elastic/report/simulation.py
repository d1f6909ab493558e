"""Results of a simulation in the terminal: the strategies, the swept settings, and a chart of cost against time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from azureml_elastic.report.cells import duration_text, money_text
from azureml_elastic.report.charts import Scale
from azureml_elastic.simulate.comparison import Candidate, pareto_front
from azureml_elastic.simulate.scenario import Outcome

_NAMES = {"rigid": "rigid", "restart": "checkpoint and restart", "elastic": "elastic"}
_WIDTH, _HEIGHT = 60, 14
_HOUR = 3600


def strategies_table(results: Sequence[Outcome]) -> RenderableType:
    """Return a table of the strategies on the same machines, with the activities of their nodes."""
    table = Table(title="the same work on the same machines", title_justify="left", title_style="bold")
    table.add_column("")
    for result in results:
        table.add_column(_NAMES[result.strategy], justify="right")
    table.add_row("time", *(_time(result) for result in results))
    table.add_row("node-hours", *(f"{result.node_hours:,.1f}" for result in results))
    if any(result.cost for result in results):
        table.add_row("cost", *(money_text(result.cost, result.bill.currency) for result in results))
    table.add_row("goodput", *(f"{result.goodput:.1%}" for result in results))
    table.add_row("restarts, rounds", *(f"{result.restarts:,}" for result in results))
    table.add_row("steps trained again", *(f"{result.lost_steps:,}" for result in results))
    for activity in ("training", "saving", "lost work", "recovering", "starting", "waiting", "idle"):
        seconds = [sum(total.seconds for total in each.activities if total.activity == activity) for each in results]
        if any(seconds):
            table.add_row(Text(f"  {activity}", style="dim"), *(f"{each / _HOUR:,.1f} h" for each in seconds))
    notes = [Text(f"{_NAMES[each.strategy]}: {each.why}", style="yellow") for each in results if each.why]
    return Group(table, *notes)


def cost_chart(found: Sequence[Candidate], best: Candidate | None = None) -> RenderableType:
    """Return a chart of cost (node-hours without prices) against time: ``●`` on the Pareto front, ``★`` recommended."""
    finished = [each for each in found if each.result.finished]
    if not finished:
        return Text("No setting has done the work within the time.", style="yellow")
    front = pareto_front(finished)
    expenses = [each.expense for each in finished]
    times = [each.result.seconds for each in finished]
    columns, rows = Scale(min(times), max(times), 0, _WIDTH), Scale(min(expenses), max(expenses), 0, _HEIGHT)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    # The most important mark last, as it replaces others in its place.
    for mark, group in (("·", finished), ("●", front), ("★", [best] if best is not None else [])):
        for each in group:
            y, x = min(_HEIGHT - 1, int(rows(each.expense))), min(_WIDTH - 1, int(columns(each.result.seconds)))
            grid[_HEIGHT - 1 - y][x] = mark
    unit = finished[0].result.bill.currency if finished[0].result.cost else "node-hours"
    labels = {0: f"{max(expenses):,.0f}", _HEIGHT - 1: f"{min(expenses):,.0f}"}
    lines: list[RenderableType] = [Text(f"{unit} against time, ● Pareto front, ★ recommended", style="bold")]
    for number, row in enumerate(grid):
        lines.append(Text.assemble((f"{labels.get(number, ''):>10} │", "dim"), ("".join(row), "cyan")))
    lines.append(Text(" " * 11 + "└" + "─" * _WIDTH, style="dim"))
    lines.append(Text(" " * 12 + duration_text(min(times)) + duration_text(max(times)).rjust(_WIDTH - 10), style="dim"))
    return Group(*lines)


def recommendation(found: Sequence[Candidate], best: Candidate | None) -> RenderableType:
    """Return the settings on the Pareto front, with the recommended ones marked."""
    table = Table(title="settings for which none is faster and cheaper", title_justify="left", title_style="bold")
    for name in ("", "nodes", "checkpoints", "pools", "time", "node-hours", "cost"):
        table.add_column(name, justify="right" if name in ("time", "node-hours", "cost") else "left")
    for each in pareto_front(found):
        scenario, result = each.scenario, each.result
        table.add_row(
            "★" if each is best else "",
            f"{scenario.minimum}:{scenario.maximum}",
            each.every,
            each.mix,
            duration_text(result.seconds),
            f"{result.node_hours:,.1f}",
            money_text(result.cost, result.bill.currency) or "no price",
        )
    return table


def _time(result: Outcome) -> str:
    return duration_text(result.seconds) if result.finished else f"not within {duration_text(result.seconds)}"
