"""Values that only azure-ai-ml's types can tell."""

import pytest
from azure.ai.ml import Input

from azureml_elastic.errors import SubmitError
from tests.unit.submit.jobs import small_job


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
@pytest.mark.parametrize(
    ("value", "part"),
    [
        (Input(type="uri_folder"), "has no value"),
        (Input(type="integer"), "has no value"),
        ({"type": "uri_file"}, "has no value"),
        ([1, 2], "is of the type list"),
        (None, "is of the type NoneType"),
    ],
)
def test_inputs_without_a_usable_value(placement, value, part):
    with pytest.raises(SubmitError) as caught:
        small_job(placement, inputs={"x": value}).compile()
    assert "input 'x'" in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("name", ["azureml:my-env@latest", "my-env@latest"])
def test_the_label_of_an_environment_is_looked_up_by_the_name_alone(client, workspace, name):
    identifier = (
        "/subscriptions/00000000-0000-0000-0000-0000000000aa/resourceGroups/group/providers"
        "/Microsoft.MachineLearningServices/workspaces/workspace/environments/my-env/versions/7"
    )
    workspace.entities["/environments/my-env/versions/7"] = {
        "id": identifier,
        "name": "7",
        "properties": {"image": "i"},
        "systemData": {},
    }
    client.jobs.create_or_update(small_job(environment=name))
    asked = [request for request in workspace.requests if "/environments/" in request]
    assert asked
    assert not [request for request in asked if "azureml:" in request]
