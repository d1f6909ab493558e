"""What importing this library costs, and compiling a job of 64 nodes, beside azure-ai-ml's own pipeline of 64 nodes.

Prints medians and the ratio. Imports are measured in fresh processes, from warm files.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

NODES, RUNS = 64, 9
IMPORT = "import time; began = time.perf_counter(); import {name}; print(time.perf_counter() - began)"


def import_seconds(name: str) -> float:
    """Return the median time of an import."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT.format(name=name)]
    times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(RUNS)]
    return statistics.median(times)


def side_by_side(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Return the median time of each, run in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS + 1):
        for times, call in zip(found, (ours, theirs), strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(found[0][1:]), statistics.median(found[1][1:])


def main() -> None:
    """Measure and print."""
    print(f"import azureml_elastic: {import_seconds('azureml_elastic'):.3f} s (azure.ai.ml: ", end="", flush=True)
    print(f"{import_seconds('azure.ai.ml'):.2f} s)")
    warnings.simplefilter("ignore")
    from azure.ai.ml import Input, command, dsl

    from azureml_elastic import ElasticCommandJob, ElasticResources

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("")
        job = ElasticCommandJob(
            code=folder,
            command="python train.py --lr ${{inputs.lr}}",
            environment="azureml:env:1",
            compute="cluster",
            inputs={"lr": 0.1},
            resources=ElasticResources(max_instance_count=NODES),
        )
        node = command(
            command="python train.py --lr ${{inputs.lr}}",
            code=folder,
            environment="azureml:env:1",
            inputs={"lr": Input(type="number")},
        )

        @dsl.pipeline
        def pipeline(lr):
            for _ in range(NODES):
                node(lr=lr)

        ours, theirs = side_by_side(job.compile, lambda: pipeline(lr=0.1))
    print(f"compile {NODES} nodes: {ours:.3f} s, azure-ai-ml's own pipeline {theirs:.3f} s: {ours / theirs:.2f} x")


if __name__ == "__main__":
    main()
