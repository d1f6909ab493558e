"""The metrics policy: its defaults, and its way from a job to the nodes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from azureml_elastic.config import ElasticResources, MetricsPolicy, Plan

RESOURCES = ElasticResources(max_instance_count=1)


def test_mlflow_and_opentelemetry_are_on_where_the_node_is_configured_for_them():
    assert MetricsPolicy() == MetricsPolicy(mlflow=True, tensorboard=None)
    assert Plan(resources=RESOURCES).metrics == MetricsPolicy()


def test_it_is_part_of_the_plan():
    policy = MetricsPolicy(mlflow=False, tensorboard="$AZURE_ML_OUTPUT_logs")
    plan = Plan(resources=RESOURCES, metrics=policy)
    assert Plan.from_json(plan.to_json()).metrics == policy


def test_an_empty_folder_and_unknown_destinations_are_refused():
    with pytest.raises(ValidationError, match="tensorboard"):
        MetricsPolicy(tensorboard="")
    with pytest.raises(ValidationError, match="did you mean mlflow"):
        MetricsPolicy(ml_flow=True)
