"""Search a learning rate: a sweep of Azure Machine Learning whose trials are elastic jobs.

    python samples/sweep/sweep.py

The workspace is that of ``config.json`` in this folder or above, with a cluster named ``cluster``. On this machine:

    azureml-elastic workspace start -- python samples/sweep/sweep.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from azure.ai.ml import MLClient
from azure.ai.ml.sweep import Choice
from azure.identity import DefaultAzureCredential

from azureml_elastic import ElasticCommandJob, ElasticResources

train = ElasticCommandJob(
    code=str(Path(__file__).parent / "src"),
    command="python train.py --lr ${{inputs.lr}} --epochs ${{inputs.epochs}}",
    inputs={"lr": 0.05, "epochs": 2},
    environment="azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest",
    compute="cluster",
    # A trial is one job of Azure ML: its nodes start together (gang), or one after the other (service).
    resources=ElasticResources(max_instance_count=2, placement="gang"),
)


def build() -> Any:
    """Return the sweep: two learning rates, one trial after the other."""
    sweep = train(lr=Choice([0.0001, 0.05])).sweep(
        primary_metric="accuracy", goal="maximize", sampling_algorithm="grid"
    )
    sweep.set_limits(max_total_trials=2, max_concurrent_trials=1)
    return sweep


def main() -> None:
    """Submit the sweep, show it until it ends, and print the best trial."""
    client = MLClient.from_config(DefaultAzureCredential())
    name = str(client.jobs.create_or_update(build(), experiment_name="digits-sweep").name)
    client.jobs.stream(name)
    properties = client.jobs.get(name).properties or {}
    print(f"best trial: {properties['best_child_run_id']}, accuracy {properties['score']}")


if __name__ == "__main__":
    main()
