"""Which workspace a command is about."""

import json

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.cli.workspaces import WorkspaceName, WorkspaceOptions, find_workspace
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import UsageError

NOWHERE = UserEnvironment.read({"AZURE_CONFIG_DIR": "/nonexistent"})
NO_VARIABLES = UserEnvironment.read({})
NONE = WorkspaceOptions()
CONFIG = {"subscription_id": "s", "resource_group": "g", "workspace_name": "w"}


@pytest.mark.parametrize("place", ["config.json", ".azureml/config.json", "aml_config/config.json", "../config.json"])
def test_the_file_is_found_where_the_sdk_finds_it(tmp_path, place):
    start = tmp_path / "a" / "b"
    path = start / place
    path.parent.mkdir(parents=True, exist_ok=True)
    start.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIG))
    assert find_workspace(NONE, start=start, environment=NOWHERE) == WorkspaceName("s", "g", "w")


def test_options_go_before_variables_and_these_before_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environ = {"AZUREML_ARM_RESOURCEGROUP": "of the job", "AZUREML_ARM_WORKSPACE_NAME": "of the job"}
    found = find_workspace(WorkspaceOptions(name="given"), start=tmp_path, environment=UserEnvironment.read(environ))
    assert found == WorkspaceName("s", "of the job", "given")
    assert find_workspace(
        WorkspaceOptions("s", "g", "w"), start=tmp_path / "nowhere", environment=UserEnvironment.read({})
    ).variables == {
        "AZUREML_ARM_SUBSCRIPTION": "s",
        "AZUREML_ARM_RESOURCEGROUP": "g",
        "AZUREML_ARM_WORKSPACE_NAME": "w",
    }


def test_a_scope_of_older_tools_is_read(tmp_path):
    scope = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
    (tmp_path / "config.json").write_text(json.dumps({"Scope": scope}))
    assert find_workspace(NONE, start=tmp_path, environment=NOWHERE) == WorkspaceName("s", "g", "w")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "give --subscription, --resource-group, --workspace-name before"),
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ('{"subscription_id": "s", "resource_group": "g"}', "has no 'workspace_name'"),
    ],
)
def test_what_is_missing_is_said(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        find_workspace(NONE, start=tmp_path, environment=NOWHERE)


def test_the_defaults_of_az_are_taken_where_nothing_else_names_the_workspace(tmp_path):
    (tmp_path / "config").write_text("[defaults]\ngroup = g\nworkspace = w\n")
    profile = {"subscriptions": [{"id": "other"}, {"id": "s", "isDefault": True}]}
    (tmp_path / "azureProfile.json").write_text(json.dumps(profile), encoding="utf-8-sig")
    environment = UserEnvironment.read({"AZURE_CONFIG_DIR": str(tmp_path)})
    assert find_workspace(NONE, start=tmp_path, environment=environment) == WorkspaceName("s", "g", "w")
    environment = environment.with_variables({"AZURE_DEFAULTS_WORKSPACE": "mine"})
    assert find_workspace(NONE, start=tmp_path, environment=environment) == WorkspaceName("s", "g", "mine")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "workspace_name": "of the file"}))
    assert find_workspace(NONE, start=tmp_path, environment=environment).name == "of the file"


@pytest.mark.parametrize("text", ["[defaults", "group = g\n", ""])
def test_files_of_az_that_cannot_be_read_name_nothing(tmp_path, text):
    (tmp_path / "config").write_text(text)
    (tmp_path / "azureProfile.json").write_text(text)
    with pytest.raises(UsageError, match="Nothing names the workspace"):
        find_workspace(NONE, start=tmp_path, environment=UserEnvironment.read({"AZURE_CONFIG_DIR": str(tmp_path)}))


@pytest.mark.parametrize("words", [["status", "run", "-w", "x"], ["checkpoints", "list", "run", "-w", "x"]])
def test_an_option_of_the_workspace_behind_the_command_is_named_with_its_place(words):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"-w belongs before the command: azureml-elastic -w ... {words[0]}" in " ".join(
        result.stderr.replace("│", "").split()
    )
