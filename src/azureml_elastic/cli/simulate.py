"""``azureml-elastic simulate``: what a run takes and costs on machines that come and go, before it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from azureml_elastic.cli.failures import explained
from azureml_elastic.cli.local import parse_nodes
from azureml_elastic.cli.output import JsonOption, console_beside, write_file, write_json
from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.ledger.bill import Prices
    from azureml_elastic.simulate.comparison import Candidate
    from azureml_elastic.simulate.scenario import Outcome, Parameters, Scenario, SimulatedPool
    from azureml_elastic.simulate.traces import Trace

_INTERRUPTED = "Interrupted; nothing was simulated to the end."


@explained(_INTERRUPTED)
def simulate(
    nodes: Annotated[str, typer.Option(help="Minimum and maximum of nodes, as in 1:16.")] = "1:4",
    work: Annotated[str | None, typer.Option(help="Steps, as in 20000, or node-hours, as in 500nh.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Availability of the machines: CSV of time, node, up or down; or JSON of counts."),
    ] = None,
    hazard: Annotated[
        str | None, typer.Option(help="Losses instead of a trace, as in loss_every=6h,reclaim_every=1d.")
    ] = None,
    machines: Annotated[
        int | None, typer.Option(help="Machines of the hazard; by default the maximum of --nodes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the hazard.")] = 0,
    dedicated: Annotated[int, typer.Option(help="Dedicated machines, which are always there, as a second pool.")] = 0,
    size: Annotated[str | None, typer.Option(help="VM size of the machines, for their price.")] = None,
    prices: Annotated[Path | None, typer.Option(help="JSON file of prices per VM size and tier.")] = None,
    step_seconds: Annotated[
        str | None, typer.Option(help="Duration of a step by number of nodes, as in 1=2s,4=0.6s.")
    ] = None,
    parameters: Annotated[Path | None, typer.Option(help="JSON file of durations.")] = None,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="Folder of a run whose events give the durations; may be repeated.")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="One of the durations, as in start_seconds=90s; may be repeated.")
    ] = None,
    checkpoint_every: Annotated[str, typer.Option(help="auto, a duration such as 5m, or 100steps.")] = "5m",
    max_replacements: Annotated[
        int | None, typer.Option(help="Limit of replaced nodes; by default ten for each node of the maximum.")
    ] = None,
    within: Annotated[str, typer.Option(help="Simulated time after which a run is given up.")] = "30d",
    deadline: Annotated[
        str | None, typer.Option(help="Recommend the cheapest settings that end by then, as in 2d.")
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Look for better settings of the elastic run.")] = True,
    json: JsonOption = None,
    write_parameters: Annotated[Path | None, typer.Option(help="Write the durations in use to this file.")] = None,
    synthesize: Annotated[
        Path | None, typer.Option(help="Only write a trace of the hazard to this CSV file, of the length --for.")
    ] = None,
    length: Annotated[str, typer.Option("--for", help="Length of the synthetic trace.")] = "7d",
) -> None:
    """Simulate a run on machines that come and go: rigid, restarted from checkpoints, elastic; and recommend settings.

    The elastic run follows the decisions of this library's own agents and of its replacement policy.
    """
    from azureml_elastic.config import ReplacementPolicy
    from azureml_elastic.ledger.bill import load_prices
    from azureml_elastic.simulate.scenario import Scenario
    from azureml_elastic.simulate.traces import (
        parse_checkpoint,
        parse_hazard,
        parse_seconds,
        parse_work,
        read_trace,
        synthetic_trace,
        write_trace,
    )

    minimum, maximum = parse_nodes(nodes)
    count = maximum if machines is None else machines
    if (trace is None) == (hazard is None):
        raise UsageError("Give either --trace FILE or --hazard loss_every=6h,..., not both or none.")
    drawn = None if hazard is None else parse_hazard(hazard)
    if synthesize is not None:
        if drawn is None:
            raise UsageError("--synthesize writes a trace of a hazard; give --hazard instead of --trace.")
        write_trace(synthetic_trace(drawn, count, parse_seconds(length, "--for"), seed), synthesize)
        typer.echo(f"Wrote {synthesize}")
        return
    limit = parse_seconds(within, "--within")
    durations = _parameters(parameters, calibrate or (), step_seconds, change or ())
    if drawn is None:
        assert trace is not None
        found = read_trace(trace).repeated(limit)
    else:
        found = synthetic_trace(drawn, count, limit, seed)
    if work is None:
        raise UsageError("--work is missing; give steps, as in --work 20000, or node-hours, as in --work 500nh.")
    given = None if prices is None else load_prices(prices)
    scenario = Scenario(
        pools=_pools(found, maximum, dedicated, size, given),
        minimum=minimum,
        maximum=maximum,
        work=parse_work(work, durations.step_time(1)),
        parameters=durations,
        checkpoint=parse_checkpoint(checkpoint_every),
        replacement=ReplacementPolicy(max_replacements=max_replacements),
        prices=given,
        limit_seconds=limit,
    )
    by = None if deadline is None else parse_seconds(deadline, "--deadline")
    _show(scenario, sweep=sweep, deadline=by, json=json, write_parameters=write_parameters)


def _show(
    scenario: Scenario, *, sweep: bool, deadline: float | None, json: Path | None, write_parameters: Path | None
) -> None:
    import math

    from rich.progress import track

    from azureml_elastic.report.simulation import cost_chart, recommendation, strategies_table
    from azureml_elastic.simulate.comparison import recommend, simulate
    from azureml_elastic.simulate.comparison import sweep as swept
    from azureml_elastic.simulate.scenario import STRATEGIES

    console = console_beside(json)
    results = [simulate(scenario, each) for each in track(STRATEGIES, "simulating", console=console, transient=True)]
    console.print(strategies_table(results))
    found: list[Candidate] = []
    best = None
    if sweep:
        with console.status("looking for better settings"):
            found = swept(scenario)
        best = recommend(found, math.inf if deadline is None else deadline)
        console.print(cost_chart(found, best))
        console.print(recommendation(found, best))
        if best is None and deadline is not None:
            console.print(f"No setting ends within {deadline / 3600:g} h; raise --deadline or the maximum of --nodes.")
    write_json(_document(results, found, best), json)
    if write_parameters is not None:
        write_file(write_parameters, scenario.parameters.model_dump_json(indent=2), console)


def _parameters(
    path: Path | None, runs: Sequence[Path], step_seconds: str | None, changes: Sequence[str]
) -> Parameters:
    from azureml_elastic.ledger.reading import read_events
    from azureml_elastic.simulate.calibration import calibrate
    from azureml_elastic.simulate.scenario import Parameters
    from azureml_elastic.simulate.traces import parse_seconds, parse_step_seconds

    found = Parameters()
    if path is not None:
        try:
            found = Parameters.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UsageError(f"The parameters {path} cannot be read ({error.strerror}).") from error
    if runs:
        events = {run: read_events(run / "events") for run in runs}
        for run, own in events.items():
            if not own:
                raise UsageError(f"{run} has no events of a run. Give a folder below ./runs, or one of 'report --to'.")
        found = calibrate(events.values(), found)
    values: dict[str, Any] = dict(found)
    if step_seconds is not None:
        values["step_seconds"] = parse_step_seconds(step_seconds)
    names = [name for name in Parameters.model_fields if name != "step_seconds"]
    for entry in changes:
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not separator or name not in names:
            raise UsageError(f"--set {entry!r} is not NAME=VALUE with one of {', '.join(names)}.")
        if name == "recovery_seconds":
            values[name] = dict.fromkeys(found.recovery_seconds, parse_seconds(value, name))
        else:
            values[name] = parse_seconds(value, name)
    return Parameters.model_validate(values)


def _pools(
    trace: Trace, maximum: int, dedicated: int, size: str | None, prices: Prices | None
) -> tuple[SimulatedPool, ...]:
    """Return the machines of the trace, and the dedicated ones, which all have a price if there are prices."""
    from azureml_elastic.config import NodePool
    from azureml_elastic.simulate.scenario import SimulatedPool

    if dedicated < 0:
        raise UsageError(f"--dedicated={dedicated} is below 0; give the number of dedicated machines.")
    if prices is not None and size is None:
        raise UsageError(f"--prices needs --size; the file has {', '.join(prices.per_hour)}.")
    spot = NodePool("spot", max_instance_count=min(maximum, trace.machines))
    pools = [SimulatedPool(spot, trace, size, "low_priority")]
    if dedicated:
        pools.append(SimulatedPool(NodePool("dedicated", max_instance_count=dedicated), None, size, "dedicated"))
    for pool in pools:
        if prices is not None and prices.of(size, pool.tier) is None:
            raise UsageError(f"The prices have no {pool.tier} price of {size}; add it, or give another --size.")
    return tuple(pools)


def _document(results: Sequence[Outcome], found: Sequence[Candidate], best: Candidate | None) -> dict[str, Any]:
    from azureml_elastic.simulate.comparison import pareto_front

    front = pareto_front(found)
    return {
        "version": 1,
        "strategies": [_row(result) for result in results],
        "candidates": [
            {
                "minimum": each.scenario.minimum,
                "maximum": each.scenario.maximum,
                "checkpoint_every": each.every,
                "pools": each.mix,
                "pareto": each in front,
                "recommended": each is best,
                **_row(each.result),
            }
            for each in found
        ],
    }


def _row(result: Outcome) -> dict[str, Any]:
    return {
        "strategy": result.strategy,
        "finished": result.finished,
        "why": result.why,
        "seconds": result.seconds,
        "node_hours": result.node_hours,
        "cost": None if result.cost is None else float(result.cost),
        "currency": result.bill.currency,
        "goodput": result.goodput,
        "steps": result.steps,
        "lost_steps": result.lost_steps,
        "restarts": result.restarts,
        "activities": [vars(total) for total in result.activities],
    }
