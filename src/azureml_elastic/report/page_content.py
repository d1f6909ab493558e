"""Everything that the page of a run shows, derived from its report and its events. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from azureml_elastic.ledger.accounting import Total
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import RoundSpan
from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import (
    OUTCOMES,
    activity_text,
    duration_text,
    goodput_text,
    money_text,
    number_text,
    utc_text,
)
from azureml_elastic.report.failures import Failure, failures
from azureml_elastic.report.node_timelines import NodeTimeline, node_timelines
from azureml_elastic.report.series import Series, metric_series, throughput
from azureml_elastic.report.tables import (
    DataTable,
    audit_verdict,
    checkpoints_table,
    cost_notes,
    cost_table,
    notes,
    recoveries_table,
    rounds_table,
)

_MOST_SERIES = 24
_MOST_SIZES = 1000
_MOST_FACT_SIZES = 4


@dataclass(frozen=True)
class Fact:
    """A fact of the page's head.

    Args:
        state: ``good`` or ``bad`` where the fact is a judgement, otherwise empty.
    """

    name: str
    value: str
    detail: str = ""
    state: str = ""


@dataclass(frozen=True)
class Rescale:
    """A change of the world size after a step."""

    step: int
    before: int
    after: int


@dataclass(frozen=True)
class WaterfallBar:
    """A part of the nodes' time.

    Args:
        activity: activity, ``delivered`` for the whole.
        seconds: node-seconds of the part.
        left: node-seconds that are left below it.
    """

    name: str
    activity: str
    seconds: float
    left: float


@dataclass(frozen=True)
class PageContent:
    """Content of the page of a run.

    Args:
        verdict: outcome as the rest of a sentence.
        start: begin of the time axis in seconds since the epoch.
        duration: length of the time axis in seconds.
        hidden_nodes: number of nodes without a timeline.
        rescales: changes of the world size over the steps.
        throughput: steps per second and samples per second, as far as they are known.
        training_notes: sentences below the charts of metrics and throughput.
        waterfall: delivered time, what was subtracted from it, and what is left.
        cost_notes: sentences below it.
    """

    title: str
    state: str
    verdict: str
    message: str
    facts: tuple[Fact, ...]
    start: float
    duration: float
    sizes: tuple[RoundSpan, ...]
    nodes: tuple[NodeTimeline, ...]
    hidden_nodes: int
    rescales: tuple[Rescale, ...]
    metrics: tuple[Series, ...]
    throughput: tuple[Series, ...]
    training_notes: tuple[str, ...]
    waterfall: tuple[WaterfallBar, ...]
    cost: DataTable | None
    cost_notes: tuple[str, ...]
    checkpoints: DataTable
    rounds: DataTable
    recoveries: DataTable
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]


def page_content(report: Report, picture: Picture, *, running: bool = False) -> PageContent:
    """Return the content of the page."""
    spans = report.spans(picture)
    if report.bill is None and report.nodes:
        # Without prices the page has the node-hours at least.
        report = report.with_bill(picture, None, spans)
    ran = [round_ for round_ in report.rounds if round_.ran]
    times = [(span.started, span.ended) for span in spans] + [(round_.started, round_.ended) for round_ in ran]
    timelines = node_timelines(report, spans, picture)
    start = min((began for began, _ in times), default=0.0)
    duration = max(max((ended for _, ended in times), default=0.0) - start, 1e-3)
    reporters = {round_.number: round_.reporter for round_ in report.rounds}
    metrics = metric_series(picture)
    rescales = tuple(_rescales(ran))
    return PageContent(
        title=report.name,
        state="running" if running else report.outcome,
        verdict="is running" if running else OUTCOMES[report.outcome],
        message=report.message,
        facts=tuple(_facts(report, start, duration, bool(times))),
        start=start,
        duration=duration,
        sizes=tuple(_sizes(ran)),
        nodes=tuple(timelines),
        hidden_nodes=len({span.node for span in spans}) - len(timelines),
        rescales=rescales,
        metrics=tuple(metrics[:_MOST_SERIES]),
        throughput=tuple(throughput(picture, reporters)),
        training_notes=tuple(_training_notes(rescales, metrics)),
        waterfall=tuple(_waterfall(report.activities)),
        cost=cost_table(report.bill),
        cost_notes=tuple(cost_notes(report.bill, report.samples)),
        checkpoints=checkpoints_table(picture, start),
        rounds=rounds_table(report, start),
        recoveries=recoveries_table(report),
        failures=tuple(failures(report, picture, start)),
        notes=tuple(notes(report)),
    )


def _facts(report: Report, start: float, duration: float, known: bool) -> Iterable[Fact]:
    if report.last_step:
        again = f"{report.lost_steps:,} trained again" if report.lost_steps else "none trained again"
        yield Fact("Steps", f"{report.last_step:,}", again)
    if known:
        yield Fact("Duration", duration_text(duration), f"from {utc_text(start)}")
    if report.world_sizes:
        sizes = [str(size) for size in report.world_sizes]
        rounds = counted(sum(round_.ran for round_ in report.rounds), "round")
        if len(sizes) > _MOST_FACT_SIZES:
            sizes = [sizes[0], "…", sizes[-1]]
            rounds += f", {min(report.world_sizes):,} to {max(report.world_sizes):,} workers"
        yield Fact("World size", " → ".join(sizes), rounds)
    if report.goodput is not None:
        text = goodput_text(report.goodput, report.highest_goodput, digits=1)
        yield Fact("Goodput", text, "share of the nodes' time in training that was kept")
    if report.recoveries:
        middle = sorted(recovery.seconds for recovery in report.recoveries)[len(report.recoveries) // 2]
        of_several = "median " if len(report.recoveries) > 1 else ""
        yield Fact("Recoveries", f"{len(report.recoveries):,}", f"{of_several}{duration_text(middle)}")
    if report.bill is not None:
        cost, saving = report.bill.cost, report.bill.saving
        detail = "" if saving is None else f"{saving:.1%} saved against dedicated nodes"
        if cost is not None:
            yield Fact("Cost", money_text(cost, report.bill.currency), detail)
        elif report.bill.lines:
            yield Fact("Node-hours", number_text(float(report.bill.hours)), "no price was given")
    if report.audit is not None:
        state, text = audit_verdict(report.audit)
        yield Fact("Exactly once", {"good": "✓ Yes", "bad": "✕ No"}.get(state, "Not proven"), text, state)


def _sizes(ran: Sequence[RoundSpan]) -> Iterable[RoundSpan]:
    """Return the rounds whose sizes are shown: the shortest are left out where there are too many."""
    longest = sorted(ran, key=lambda each: each.started - each.ended)[:_MOST_SIZES]
    return sorted(longest, key=lambda each: each.number)


def _rescales(ran: Sequence[RoundSpan]) -> Iterable[Rescale]:
    trained = [round_ for round_ in ran if round_.last_step is not None]
    for before, after in pairwise(trained):
        if before.world_size != after.world_size:
            step = after.restored_step if after.restored_step is not None else before.last_step
            yield Rescale(step or 0, before.world_size, after.world_size)


def _training_notes(rescales: Sequence[Rescale], metrics: Sequence[Series]) -> Iterable[str]:
    if rescales:
        yield "Dashed lines, or short strokes at the top: the number of workers changed after this step."
    if any(bucket.not_finite for series in metrics[:_MOST_SERIES] for bucket in series.buckets):
        yield "Crosses: values that are NaN or infinite."
    if len(metrics) > _MOST_SERIES:
        yield f"{len(metrics) - _MOST_SERIES:,} further metrics are in the event files."


def _waterfall(activities: Sequence[Total]) -> Iterable[WaterfallBar]:
    """Return the delivered time, all that is not training, the largest part of each kind first, and what is left."""
    whole = left = math.fsum(total.seconds for total in activities)
    if not whole:
        return
    yield WaterfallBar("delivered", "delivered", whole, whole)
    order = ("starting", "waiting", "idle", "saving", "recovering", "unknown", "lost work")
    for total in sorted(activities, key=lambda each: (each.activity == "training", _index(order, each.activity))):
        if total.activity != "training":
            left -= total.seconds
            yield WaterfallBar(
                activity_text(total.activity, total.cause), total.activity, total.seconds, max(0.0, left)
            )
    kept = math.fsum(total.seconds for total in activities if total.activity == "training")
    yield WaterfallBar("training, kept", "training", kept, 0.0)


def _index(order: Sequence[str], activity: str) -> int:
    return order.index(activity) if activity in order else len(order)
