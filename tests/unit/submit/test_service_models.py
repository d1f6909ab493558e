"""All bodies that these tests submit fit the models of the service's API; here, that the check finds what does not."""

import copy

import pytest

from tests.support.rest_models import enumerations_are_known, problems_of_job
from tests.unit.submit.test_submission import make

ENUMERATED = pytest.mark.skipif(not enumerations_are_known(), reason="this azure-ai-ml has models without enumerations")


@pytest.fixture
def body(client, workspace):
    """The body of a submitted command job."""
    client.jobs.create_or_update(make("gang", name="run", job_tier="Spot"))
    return copy.deepcopy(workspace.jobs[0])


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("properties.commnd", "x", "properties.commnd is no field of CommandJob"),
        ("properties.resources.instanceKind", "x", "properties.resources.instanceKind is no field of"),
        ("properties.command", None, "properties.command is missing"),
        ("properties.resources.instanceCount", "two", "properties.resources.instanceCount='two'"),
        ("properties.tags", {"a": 1}, "properties.tags.a=1"),
        ("properties.limits.timeout", "an hour", "properties.limits.timeout='an hour'"),
        pytest.param(
            "properties.queueSettings.jobTier", "Cheap", "properties.queueSettings.jobTier=", marks=ENUMERATED
        ),
        pytest.param("properties.inputs.data.mode", "Copied", "properties.inputs.data.mode='Copied'", marks=ENUMERATED),
        ("properties.identity.clientIdd", "x", "properties.identity.clientIdd is no field of ManagedIdentity"),
    ],
)
def test_what_does_not_fit_is_found(body, path, value, problem):
    assert problems_of_job(body) == []
    *parents, name = path.split(".")
    holder = body
    for parent in parents:
        holder = holder[parent]
    holder[name] = value
    assert any(text.startswith(problem) for text in problems_of_job(body)), problems_of_job(body)
