"""Runs of stock scripts of training stacks on local clusters, and what they have recorded."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from azureml_elastic.config import ElasticDistribution, FixedGlobalBatch
from azureml_elastic.config.distribution import Recovery
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.local.node_start import StartMethod
from tests.support.node_server import forked_with
from tests.support.whole_runs import GATHERING

FAULTS = "kill=rank0@step:33,add@step:60,preempt=any@step:90"
"""The loss of rank 0's node, a node's arrival and a preemption with notice."""


@dataclass(frozen=True)
class StockRun:
    """A finished run.

    Args:
        report: the run's report.
        record: what the script has recorded of its training, as JSON.
        folder: folder that the script was given.
    """

    report: Report
    record: Any
    folder: Path

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the logged values of a name, by step."""
        return [(each["step"], each[name]) for each in self.record["log"] if name in each]

    @property
    def output(self) -> str:
        """What all nodes have printed."""
        return "".join(path.read_text() for path in self.report.paths.logs.iterdir())

    def require_whole(self, most_repeated: int = 0) -> None:
        """Check that each sample was trained once, and that no more steps than these were trained again."""
        audit = self.report.audit
        assert audit is not None
        assert audit.complete, audit
        assert audit.rolled_back_steps <= most_repeated

    def require_faults(self, most_repeated: int = 0) -> None:
        """Check this of a run with faults, all of which have come to pass, and that nodes came and went."""
        self.require_whole(most_repeated)
        assert not self.report.missed_faults
        assert len(self.report.world_sizes) > 2


def run_stock(
    script: Path,
    folder: Path,
    *arguments: str,
    chaos: str = "",
    preload: bool = True,
    recovery: Recovery = "restart",
    start: StartMethod = "fork",
    imports: Path | None = None,
    results: str = "record.json",
    processes: int = 1,
    max_restarts: int = 3,
    **options: Any,
) -> StockRun:
    """Run a script to its end, with a folder for its output as the first argument.

    Args:
        script: script of a training stack.
        folder: new folder for the run and the script.
        arguments: further arguments of the script.
        chaos: faults.
        preload: whether the workers are forked from a preload server.
        recovery: what becomes of the workers when the round changes.
        start: ``fork`` forks the nodes from a server that has imported the stack for all tests of the process.
        imports: script or module whose imports that server has, in place of the script.
        results: name of the file in which the script records its training.
        processes: number of workers of a node.
        max_restarts: failures of workers after which the run ends.
        options: further arguments of the cluster.
    """
    output = folder / "script"
    output.mkdir(parents=True)
    distribution = ElasticDistribution(
        preload_workers=preload,
        recovery=recovery,
        process_count_per_instance=processes,
        max_restarts=max_restarts,
    )
    cluster = LocalCluster(
        options.pop("nodes", (1, 3)),
        start=forked_with(imports or script) if start == "fork" else start,
        chaos=parse_schedule(chaos) if chaos else None,
        run_dir=folder / "run",
        timeout=200,
        audit=True,
        distribution=distribution,
        rendezvous=GATHERING,
        **options,
    )
    report = cluster.run([sys.executable, str(script), "--folder", str(output), *arguments])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert all(node.leftovers == 0 for node in report.nodes)
    return StockRun(report, json.loads((output / results).read_text()), output)


def recorded(run: Any) -> list[dict[str, Any]]:
    """Return the lines that all processes of a script have recorded."""
    return [json.loads(line) for file in run.folder.glob("steps.*") for line in file.read_text().splitlines()]


def seen(run: Any) -> dict[int, Counter[int]]:
    """Return by epoch how often each sample was given to the model."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for line in recorded(run):
        if "samples" in line:
            counts[line["epoch"]].update(line["samples"])
    return counts


def assert_same_rates(found: Mapping[int, float], expected: Mapping[int, float]) -> None:
    """Check learning rates by step, as scripts have recorded them in a run whose rank 0 was killed once at most.

    A step is complete once one rank has completed it. Rank 0 may be killed in it before the script's line is written.
    """
    missing = expected.keys() - found.keys()
    assert len(missing) <= 1, f"no line of the steps {sorted(missing)}"
    assert found == pytest.approx({step: rate for step, rate in expected.items() if step not in missing}, abs=1e-9)


def assert_weights_do_not_depend_on_the_world_size(
    run_script: Callable[..., StockRun], folder: Path, *arguments: str
) -> None:
    """Run a script without random layers on one node and on two, which share three parts of a step unequally.

    Args:
        run_script: function that runs the script, as :func:`run_stock` does.
        folder: folder of the runs.
        arguments: further arguments of the script.
    """
    policy = FixedGlobalBatch(logical_workers=3)
    # The last window is smaller than others, as of more samples; after fewer steps it weighs more.
    options = ("--pause", "0", "--dropout", "0", "--epochs", "1", "--samples", "280", *arguments)
    runs = (run_script(folder / str(n), *options, nodes=(n, n), batch=policy) for n in (1, 2))
    one, two = (torch.load(run.folder / "model.pt") for run in runs)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
