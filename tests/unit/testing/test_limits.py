"""What the local workspace refuses in a job's document, as Azure ML does."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.resources import check_limits

WORKSPACE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"displayName": "x" * 257}, "displayName has 257 characters, above the limit of 256"),
        ({"description": "x" * 5001}, "above the limit of 5000"),
        ({"tags": {str(number): "" for number in range(51)}}, "51 tags, above the limit of 50"),
        ({"properties": {"x" * 101: "1"}}, "101 characters and its value 1; the limits are 100 and 1000"),
        ({"properties": {"x": "1" * 1001}}, "its value 1001"),
        ({"computeId": "serverless"}, "computeId='serverless' is not the id of a compute"),
        ({"resources": {"shmSize": "64 gb"}}, "shmSize='64 gb'"),
        ({"jobs": {"a": {"resources": {"shm_size": "0g"}}}}, "shmSize='0g'"),
        ({"jobs": {"a": {"queue_settings": {"job_tier": "spot"}}}}, "jobTier='spot' is none of Null, Spot"),
        ({"jobs": {"a": {"computeId": "gpu"}}}, "computeId='gpu'"),
    ],
)
def test_what_azure_ml_refuses_is_refused(properties, said):
    with pytest.raises(UsageError) as refusal:
        check_limits(properties)
    assert said in str(refusal.value)


def test_what_azure_ml_accepts_is_accepted():
    step = {"computeId": f"{WORKSPACE}/computes/serverless", "resources": {"shm_size": "64g"}}
    tags = {"x" * 100: "1" * 1000}
    check_limits({"displayName": "x" * 256, "tags": tags, "properties": tags, "jobs": {"a": step, "b": {}}})
    check_limits({"tags": None, "resources": None, "queueSettings": {"jobTier": "Spot"}})
