"""Where the metrics of a run are published."""

from __future__ import annotations

from pydantic import Field

from azureml_elastic.config.base import ConfigModel

__all__ = ["MetricsPolicy"]


class MetricsPolicy(ConfigModel):
    """Where the agent of rank 0's node publishes what the script logs, and the metrics of the run itself.

    Publishing never delays or fails a run.

    Args:
        mlflow: whether to publish to MLflow, where ``MLFLOW_TRACKING_URI`` is set, as on Azure ML, and MLflow is
            installed.
        tensorboard: folder for TensorBoard's files, which all nodes see, or one that Azure ML uploads; variables of the
            node, as in ``"$AZURE_ML_OUTPUT_logs"``, are expanded. ``None`` for no files. Needs the extra
            ``tensorboard``.
        opentelemetry: whether to export metrics and spans by OpenTelemetry, where ``OTEL_EXPORTER_OTLP_ENDPOINT`` is
            set. Needs the extra ``opentelemetry``.
    """

    mlflow: bool = True
    tensorboard: str | None = Field(default=None, min_length=1)
    opentelemetry: bool = True
