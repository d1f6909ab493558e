"""Why a path on the compute is refused: azure-ai-ml itself does not carry it. Should a release do, these fail."""

import pytest
from azure.ai.ml import Input, Output, command

URI = "azureml://datastores/workspaceblobstore/paths/x"


def make(**fields):
    return command(command="python train.py", code="src", environment="e:1", compute="gpu", **fields)


def test_azure_ai_ml_drops_that_of_an_output(client, sent):
    client.jobs.create_or_update(make(outputs={"o": Output(type="uri_folder", path=URI, path_on_compute="/data")}))
    (body,) = sent()
    assert body["properties"]["outputs"]["o"] == {"jobOutputType": "uri_folder", "uri": URI}


def test_azure_ai_ml_cannot_submit_that_of_an_input(client, workspace):
    with pytest.raises(KeyError, match="base_path"):
        client.jobs.create_or_update(make(inputs={"i": Input(type="uri_folder", path=URI, path_on_compute="/data")}))
    assert workspace.jobs == []
