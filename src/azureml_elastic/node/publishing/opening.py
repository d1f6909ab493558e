"""Decides where a node publishes: by the job's policy and the node's environment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from string import Template

from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.publishing.mlflow import MlflowPublisher, mlflow_target
from azureml_elastic.node.publishing.opentelemetry import ENDPOINT, open_otlp
from azureml_elastic.node.publishing.publisher import Publishing, PublishingThread
from azureml_elastic.node.publishing.tensorboard import TensorBoardPublisher

__all__ = ["open_publishing"]


def open_publishing(identity: NodeIdentity, environ: Mapping[str, str]) -> Publishing:
    """Return the destinations of a node, which are opened when there is something to publish.

    Args:
        identity: identity of the node.
        environ: environment of the agent.
    """
    policy = identity.plan.metrics
    threads: list[PublishingThread] = []
    target = mlflow_target(identity.plan, identity.run_id, environ)
    if target is not None:
        threads.append(PublishingThread("MLflow", partial(MlflowPublisher, target)))
    if policy.tensorboard is not None:
        folder = Path(Template(policy.tensorboard).safe_substitute(environ))
        threads.append(PublishingThread("TensorBoard", partial(TensorBoardPublisher, folder, identity.node)))
    if policy.opentelemetry and environ.get(ENDPOINT):
        opened = partial(open_otlp, identity.run_id, identity.node, dict(environ))
        threads.append(PublishingThread("OpenTelemetry", opened))
    return Publishing(threads)
