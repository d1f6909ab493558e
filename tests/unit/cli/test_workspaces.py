"""Which workspace a command is about."""

import json

import pytest

from azureml_elastic.cli.workspaces import WorkspaceName, find_workspace
from azureml_elastic.errors import UsageError

CONFIG = {"subscription_id": "s", "resource_group": "g", "workspace_name": "w"}


@pytest.mark.parametrize("place", ["config.json", ".azureml/config.json", "aml_config/config.json", "../config.json"])
def test_the_file_is_found_where_the_sdk_finds_it(tmp_path, place):
    start = tmp_path / "a" / "b"
    path = start / place
    path.parent.mkdir(parents=True, exist_ok=True)
    start.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIG))
    assert find_workspace(start=start, environ={}) == WorkspaceName("s", "g", "w")


def test_options_go_before_variables_and_these_before_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environ = {"AZUREML_ARM_RESOURCEGROUP": "of the job", "AZUREML_ARM_WORKSPACE_NAME": "of the job"}
    found = find_workspace(None, None, "given", start=tmp_path, environ=environ)
    assert found == WorkspaceName("s", "of the job", "given")
    assert find_workspace("s", "g", "w", start=tmp_path / "nowhere", environ={}).variables == {
        "AZUREML_ARM_SUBSCRIPTION": "s",
        "AZUREML_ARM_RESOURCEGROUP": "g",
        "AZUREML_ARM_WORKSPACE_NAME": "w",
    }


def test_a_scope_of_older_tools_is_read(tmp_path):
    scope = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
    (tmp_path / "config.json").write_text(json.dumps({"Scope": scope}))
    assert find_workspace(start=tmp_path, environ={}) == WorkspaceName("s", "g", "w")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "give --subscription, --resource-group, --workspace"),
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ('{"subscription_id": "s", "resource_group": "g"}', "has no 'workspace_name'"),
    ],
)
def test_what_is_missing_is_said(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        find_workspace(start=tmp_path, environ={})
