"""Prepare data, train on it elastically and evaluate the model: one pipeline of Azure Machine Learning.

    python samples/pipeline/pipeline.py

The workspace is that of ``config.json`` in this folder or above, with a cluster named ``cluster``. On this machine:

    azureml-elastic workspace start -- python samples/pipeline/pipeline.py
"""

from pathlib import Path
from typing import Any

from azure.ai.ml import Input, MLClient, Output, command, dsl
from azure.ai.ml.entities import PipelineJob, PipelineJobSettings
from azure.identity import DefaultAzureCredential

from azureml_elastic import ElasticCommandJob, ElasticResources

CODE = str(Path(__file__).parent / "src")
ENVIRONMENT = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest"

prepare = command(
    code=CODE,
    command="python prepare.py --out ${{outputs.data}}",
    outputs={"data": Output(type="uri_folder")},
    environment=ENVIRONMENT,
)

train = ElasticCommandJob(
    code=CODE,
    command="python train.py --data ${{inputs.data}} --model ${{outputs.model}} --epochs ${{inputs.epochs}} "
    "--step-delay ${{inputs.step_delay}}",
    inputs={"data": Input(type="uri_folder"), "epochs": 4, "step_delay": 0.0},
    outputs={"model": Output(type="uri_folder")},
    environment=ENVIRONMENT,
    compute="cluster",
    resources=ElasticResources(min_instance_count=1, max_instance_count=3),
)

evaluate = command(
    code=CODE,
    command="python evaluate.py --data ${{inputs.data}} --model ${{inputs.model}} --report ${{outputs.report}}",
    inputs={"data": Input(type="uri_folder"), "model": Input(type="uri_folder")},
    outputs={"report": Output(type="uri_folder")},
    environment=ENVIRONMENT,
)


@dsl.pipeline
def digits(epochs: int, step_delay: float) -> dict[str, Any]:
    """Three steps, of which the second is elastic."""
    prepared = prepare()
    trained = train(data=prepared.outputs["data"], epochs=epochs, step_delay=step_delay)
    evaluated = evaluate(data=prepared.outputs["data"], model=trained.outputs["model"])
    return {"report": evaluated.outputs["report"]}


def build(epochs: int = 4, step_delay: float = 0.0) -> PipelineJob:
    """Return the pipeline, which goes on when a node is lost."""
    pipeline = digits(epochs=epochs, step_delay=step_delay)
    pipeline.settings = PipelineJobSettings(default_compute="cluster", continue_on_step_failure=True)
    return pipeline


def run(client: MLClient, epochs: int = 4, step_delay: float = 0.0) -> str:
    """Submit the pipeline, show it until it ends, download its report, and return its name."""
    name = str(client.jobs.create_or_update(build(epochs, step_delay), experiment_name="digits-pipeline").name)
    client.jobs.stream(name)
    client.jobs.download(name, output_name="report", download_path="downloaded")
    return name


if __name__ == "__main__":
    run(MLClient.from_config(DefaultAzureCredential()))
