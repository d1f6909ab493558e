"""Compare a base job, on all nodes from beginning to end, with an elastic job whose nodes come and go.

python samples/t5_summarization --model t5-small --dataset cnn_dailymail
python samples/t5_summarization --small        # a tiny model on one machine, in a minute

Both run on local nodes. It writes ``comparison.html``: world size, loss over steps, time and cost. Costs need prices of
a node per hour, ``--price`` for the base job and ``--low-priority-price`` for the elastic one. The pictures need plotly
(``pip install plotly``).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule

HERE = Path(__file__).parent
NODES = 3
SMALL = [
    "--model",
    "tiny",
    "--dataset",
    "reports",
    "--epochs",
    "6",
    "--source-length",
    "128",
    "--learning-rate",
    "3e-3",
]
SMALL_STEPS = 60
LIMIT = 1.05


@dataclass(frozen=True)
class Job:
    """A finished job.

    Args:
        name: name in the pictures.
        report: report of the run.
        losses: loss by optimizer step.
        price: price of a node per hour, if known.
    """

    name: str
    report: Report
    losses: dict[int, float]
    price: float | None

    @property
    def mean_loss(self) -> float:
        """Mean over all steps, the measure of the comparison."""
        return sum(self.losses.values()) / len(self.losses)

    @property
    def hours(self) -> float:
        """Hours from the first round to the end of the last."""
        rounds = self.report.rounds
        return (rounds[-1].ended - rounds[0].started) / 3600

    @property
    def node_hours(self) -> float:
        """Hours of the nodes in the rounds, and between them."""
        rounds = self.report.rounds
        ends = [each.started for each in rounds[1:]] + [rounds[-1].ended]
        spans = ((end - each.started) * len(each.members) for each, end in zip(rounds, ends, strict=True))
        return sum(spans) / 3600

    @property
    def cost(self) -> str:
        """Cost of the nodes, or their hours where no price is given."""
        hours = f"{self.node_hours:.4f} node hours"
        return hours if self.price is None else f"${self.node_hours * self.price:.2f} ({hours})"


def run(name: str, folder: Path, arguments: list[str], *, chaos: str, price: float | None) -> Job:
    """Run the training script on local nodes."""
    print(f"{name}: runs", flush=True)
    output = folder / name / "output"
    cluster = LocalCluster(
        (1 if chaos else NODES, NODES),
        run_dir=folder / name / "run",
        chaos=parse_schedule(chaos) if chaos else None,
        audit=True,
    )
    report = cluster.run([sys.executable, str(HERE / "train.py"), *arguments, "--output-dir", str(output)])
    if report.outcome != "succeeded":
        raise SystemExit(f"{name}: {report.message}")
    if report.audit is None or not report.audit.complete:
        raise SystemExit(f"{name}: not each sample was trained once an epoch: {report.audit}")
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return Job(name, report, {each["step"]: each["loss"] for each in log if "loss" in each}, price)


def draw(jobs: list[Job]) -> go.Figure:
    """Return the pictures and the table."""
    figure = make_subplots(
        rows=3,
        cols=1,
        subplot_titles=("World size over time", "Loss over steps", "Time and cost"),
        specs=[[{}], [{}], [{"type": "table"}]],
        row_heights=[0.3, 0.45, 0.25],
        vertical_spacing=0.09,
    )
    for job, color in zip(jobs, ("#57606a", "#0969da"), strict=True):
        rounds = job.report.rounds
        times = [each.started - rounds[0].started for each in rounds] + [rounds[-1].ended - rounds[0].started]
        sizes = [each.world_size for each in rounds] + [rounds[-1].world_size]
        line = {"name": job.name, "line_color": color, "legendgroup": job.name}
        figure.add_scatter(x=times, y=sizes, line_shape="hv", row=1, col=1, **line)
        figure.add_scatter(x=list(job.losses), y=list(job.losses.values()), showlegend=False, row=2, col=1, **line)
    for each in jobs[-1].report.rounds[1:]:
        if each.restored_step:
            figure.add_vline(each.restored_step, line_dash="dot", line_color="#8c959f", row=2, col=1)
    rows = [
        [job.name for job in jobs],
        [" → ".join(map(str, job.report.world_sizes)) for job in jobs],
        [f"{job.hours * 3600:.0f} s" for job in jobs],
        [str(max(job.losses)) for job in jobs],
        [f"{job.mean_loss:.4f}" for job in jobs],
        [job.cost for job in jobs],
    ]
    header = ["job", "world sizes", "time", "steps", "mean loss", "cost"]
    figure.add_table(header={"values": header, "align": "left"}, cells={"values": rows, "align": "left"}, row=3, col=1)
    figure.update_xaxes(title="seconds", row=1, col=1)
    figure.update_xaxes(title="optimizer step", row=2, col=1)
    figure.update_layout(height=900, template="plotly_white", title="T5 summarization: base and elastic job")
    return figure


def main() -> None:
    """Run both jobs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model and the sample's own articles")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/t5"), help="new folder for both jobs and the pictures"
    )
    parser.add_argument("--price", type=float, help="price of a dedicated node per hour")
    parser.add_argument("--low-priority-price", type=float, help="price of a low-priority node per hour")
    parser.add_argument("--steps", type=int, default=SMALL_STEPS, help="steps of the job, by which nodes come and go")
    options, arguments = parser.parse_known_args()
    arguments = [*(SMALL if options.small else []), *arguments]
    at = [round(options.steps * share) for share in (0.2, 0.35, 0.55, 0.7)]
    chaos = f"preempt=any@step:{at[0]},add@step:{at[1]},kill=rank0@step:{at[2]},add@step:{at[3]}"
    base = run("base", options.folder, arguments, chaos="", price=options.price)
    elastic = run("elastic", options.folder, arguments, chaos=chaos, price=options.low_priority_price)
    page = options.folder / "comparison.html"
    draw([base, elastic]).write_html(page)
    for job in (base, elastic):
        print(
            f"{job.name}: {max(job.losses)} steps in {job.hours * 3600:.0f} s, world sizes {job.report.world_sizes}, "
            f"mean loss {job.mean_loss:.4f}, {job.cost}"
        )
    ratio = elastic.mean_loss / base.mean_loss
    print(f"mean loss of the elastic job: {ratio:.3f} times that of the base job (at most {LIMIT})\npictures: {page}")
    raise SystemExit(ratio > LIMIT)


if __name__ == "__main__":
    main()
