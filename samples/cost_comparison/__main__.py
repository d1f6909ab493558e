"""The cost of a job on dedicated nodes and of an elastic one on low-priority nodes, by the code that bills a run.

The first table has the figures of the article "Elastic Training for AzureML": three nodes for 2 and for 2.37 hours. The
second one is the bill of a run on this machine, whose nodes come and go: each is billed for the seconds that it was
there. Run it with ``python samples/cost_comparison``.
"""

from __future__ import annotations

import argparse
import tempfile
from decimal import Decimal
from pathlib import Path

from rich.console import Console

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.ledger.bill import Bill, NodeUse, Prices, bill, load_prices
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.report.terminal import bill_table, summary

HERE = Path(__file__).parent
SIZE = "Standard_NC24rs_v3"
NODES = 3
BASE_HOURS = Decimal(2)
ELASTIC_HOURS = Decimal("2.37")


def article(prices: Prices) -> tuple[Bill, Bill]:
    """Return the bills of the article's two jobs: all nodes for the whole time of the job."""
    base = NodeUse(BASE_HOURS * 3600, "base", SIZE, "dedicated")
    elastic = NodeUse(ELASTIC_HOURS * 3600, "elastic", SIZE, "low_priority", needed_seconds=BASE_HOURS * 3600)
    return bill([base] * NODES, prices), bill([elastic] * NODES, prices)


def local_run(prices: Prices, folder: Path) -> Report:
    """Train on nodes of this machine, of which one is preempted and one comes back, as if they were the article's."""
    cluster = LocalCluster(
        (1, NODES),
        chaos=parse_schedule("preempt=node-1@step:20,add@step:40"),
        run_dir=folder / "run",
        checkpoint=CheckpointPolicy(every_steps=10),
        timeout=300,
    )
    report = cluster.run([str(HERE.parent / "digits.py"), "--epochs", "3", "--step-delay", "0.02"])
    machine = {"pool": "local", "size": SIZE, "tier": "low_priority"}
    report = report.model_copy(update={"nodes": tuple(node.model_copy(update=machine) for node in report.nodes)})
    return report.with_bill(Picture.of(read_events(report.paths.events)), prices)


def main() -> int:
    """Print both comparisons; return 0 if the local run succeeded."""
    parser = argparse.ArgumentParser(description="Compare the cost of dedicated and of elastic low-priority nodes.")
    parser.add_argument("--prices", type=Path, default=HERE / "prices.json")
    parser.add_argument("--article-only", action="store_true", help="do not run anything")
    options = parser.parse_args()
    prices = load_prices(options.prices)
    console = Console()
    base, elastic = article(prices)
    for title, made in (("Standard configuration", base), ("Low priority with elastic training", elastic)):
        console.print(f"[bold]{title}: {made.cost:.2f} {made.currency}[/bold]", highlight=False)
        console.print(bill_table(made))
    if options.article_only:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = local_run(prices, Path(folder))
        console.print(summary(report))
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
