"""``ml_client.jobs.validate(job)`` finds what submission would refuse."""

import os
import re
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from azure.ai.ml import Input, Output, command, dsl
from azure.ai.ml.operations import JobOperations

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit import ElasticCommandJob, sdk_hooks
from tests.unit.submit.test_submission import make


def validate(job, computes=("gpu",), **options):
    """Validate a job by the method of a client whose workspace has these computes."""

    def look_up(name):
        if name is not None and name not in computes:
            raise LookupError(f"there is no compute {name!r}")
        return f"/computes/{name}"

    operations = Mock(spec_set=JobOperations)
    operations._validate = lambda *args, **kwargs: JobOperations._validate(operations, *args, **kwargs)
    operations._try_get_compute_arm_id = look_up
    return JobOperations.validate(operations, job, **options)


@pytest.mark.parametrize("placement", ["fan_out", "service", "gang"])
def test_a_job_that_can_be_submitted_passes(folder, placement):
    assert validate(make(placement)).passed


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
def test_what_submission_refuses_fails(folder, placement):
    result = validate(make(placement, command="python nowhere.py"))
    assert not result.passed
    assert "'nowhere.py', which is not in code='src'" in str(result.error_messages)
    with pytest.raises(CommandError, match=r"nowhere\.py"):
        validate(make(placement, command="python nowhere.py"), raise_on_failure=True)


WRONG = {"data": Input(type="uri_folder", path="nowhere")}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"inputs": WRONG}, "The input 'data' has path='nowhere', which does not exist"),
        ({"inputs": {"data": {"type": "uri_folder", "path": "mine"}}}, "what is registered, as in 'azureml:data:1'"),
        ({"inputs": {"data": {"type": "uri_foldr", "path": "data"}}}, "Did you mean 'uri_folder'?"),
        ({"inputs": {"data": Input(type="uri_foldr", path="data")}}, "'data' has type='uri_foldr', which is none of"),
        ({"inputs": {"data": Input(path="data", mode="ro_mont")}}, "Did you mean 'ro_mount'?"),
        ({"inputs": {"data": {"typ": "uri_folder", "path": "data"}}}, "the field 'typ', which an Input does not have"),
        ({"inputs": {"data": {"type": "number", "default": "abc"}}}, "inputs.data is not valid"),
        ({"inputs": {"data": [1]}}, "'data' is of the type list"),
        ({"outputs": {"o": {"type": "uri_foldr"}}}, "The output 'o' has type='uri_foldr'"),
        ({"outputs": {"o": Output(mode="x")}}, "The output 'o' has mode='x'"),
        ({"outputs": {"o": 3}}, "The output 'o' is of the type int"),
        ({"code": "git+https://example.org/x.git"}, "code='git+https://example.org/x.git' is not supported"),
        ({"code": "https://example.org/x.git"}, "Clone or download it first"),
        ({"code": "azureml:mine:1"}, "code='azureml:mine:1' is not supported"),
        ({"environment": ""}, "environment='' is empty"),
        ({"environment": "azureml:"}, "environment='azureml:' is empty"),
        ({"environment": {}}, "environment={} is empty"),
        ({"environment": {"image": ""}}, "is empty. Give a name, as in 'azureml:my-environment@latest'"),
        ({"environment": {"imag": "x"}}, "the field 'imag', which an Environment does not have. Did you mean 'image'?"),
        ({"environment": {"image": "x", "conda_file": "no.yml"}}, "environment is not valid: No such file"),
        ({"environment": 3}, "The environment is of the type int"),
        ({"identity": {"type": "user_identiy"}}, "Did you mean 'user_identity'?"),
        ({"identity": {"type": "managed_identity", "client": "c"}}, "the field 'client'"),
        ({"identity": 3}, "The identity is of the type int"),
        ({"tags": {f"t{number}": "" for number in range(61)}}, "The job has 61 tags, above the limit of 50"),
        ({"properties": {"k" * 101: ""}}, "of properties has 101 characters"),
        ({"tags": {"a": "v" * 1001}}, "'a' of tags has 1 characters and its value 1001"),
        ({"display_name": "x" * 257}, "display_name has 257 characters, above the limit of 256"),
        ({"experiment_name": "x" * 257}, "experiment_name has 257"),
        ({"description": "x" * 5001}, "description has 5001"),
        ({"services": {"x": 3}}, "Service value for key 'x'"),
    ],
)
def test_values_of_any_kind_are_results_of_one_sentence(folder, fields, part):
    job = make("gang", **fields, command="python train.py")
    result = validate(job)
    assert not result.passed
    (message,) = result.error_messages.values()
    assert part in message
    assert not re.search("\x1b|\n", message)
    with pytest.raises(SubmitError, match=re.escape(part)):
        validate(job, raise_on_failure=True)


def test_what_is_local_or_somewhere_else_passes(folder):
    (folder / "src" / "common").symlink_to("../data")
    for path in ("data", "data/a.txt", "azureml:mine:3", "azureml://datastores/d/paths/x", "https://example.org/x"):
        inputs = {"data": Input(type="uri_file", path=path)}
        assert validate(make("gang", inputs=inputs, command="python train.py")).passed, path
    asset = "azureml:/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w/codes/c"
    assert validate(make("gang", code=f"{asset}/versions/1")).passed


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def unreadable(path):
    path.write_text("")
    path.chmod(0)


def undecodable(path):
    Path(os.fsdecode(os.fsencode(path) + b"\xff")).write_text("")


@pytest.mark.parametrize("ignored", [False, True], ids=["sent", "ignored"])
@pytest.mark.parametrize(
    ("made", "part"),
    [
        (lambda path: path.symlink_to("it"), "'src/it' cannot be followed"),
        (lambda path: path.symlink_to("/nowhere/x"), "'src/it' is a link to '/nowhere/x', which does not exist"),
        (pipe, "'src/it' is no file, but a pipe"),
        (listening, "'src/it' is no file, but a pipe, a socket"),
        (undecodable, "xff' has a name that is not UTF-8"),
        pytest.param(
            unreadable,
            "'src/it' cannot be read",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything"),
        ),
    ],
)
def test_what_cannot_be_uploaded_is_named_or_ignored(folder, client, workspace, made, part, ignored):
    made(folder / "src" / "it")
    if ignored:
        (folder / "src" / ".amlignore").write_text("it*\n")
        client.jobs.create_or_update(make("gang"))
        sent = [path.rpartition("/src/")[2] for path in workspace.blobs if "/src/" in path]
        assert sorted(sent) == [".amlignore", "train.py"]
        return
    for refused in (lambda job: validate(job, raise_on_failure=True), client.jobs.create_or_update):
        with pytest.raises(SubmitError, match=r"name it in 'src/\.amlignore'\.$") as caught:
            refused(make("gang"))
        assert part in str(caught.value)
    assert workspace.blobs == {}


@pytest.mark.parametrize("ignored", [False, True], ids=["sent", "ignored"])
@pytest.mark.parametrize(
    ("target", "part"),
    [
        (".", "'src/it' is a link that leads back to a folder that it is in. Correct or remove it."),
        ("..", "'src/it' is a link that leads back to a folder that it is in. Correct or remove it."),
        ("../data", "'src/it' is a link to a folder, which azure-ai-ml uploads although the link is ignored."),
    ],
)
def test_a_link_to_a_folder_cannot_be_ignored(folder, client, workspace, target, part, ignored):
    (folder / "src" / "it").symlink_to(target)
    (folder / "src" / ".amlignore").write_text("it/\n" if ignored else "")
    if target == "../data" and not ignored:
        client.jobs.create_or_update(make("gang"))
        sent = [path.rpartition("/src/")[2] for path in workspace.blobs if "/src/" in path]
        assert sorted(sent) == [".amlignore", "it/a.txt", "train.py"]
        return
    with pytest.raises(SubmitError, match=re.escape(part)):
        client.jobs.create_or_update(make("gang"))
    assert workspace.blobs == {}


def test_a_link_within_what_is_ignored_is_left_out(folder, client, workspace):
    (folder / "src" / "venv" / "lib").mkdir(parents=True)
    (folder / "src" / "venv" / "lib" / "large").write_text("")
    (folder / "src" / "venv" / "lib64").symlink_to("lib")
    (folder / "src" / ".amlignore").write_text("venv/\n")
    client.jobs.create_or_update(make("gang"))
    sent = [path.rpartition("/src/")[2] for path in workspace.blobs if "/src/" in path]
    assert sorted(sent) == [".amlignore", "train.py"]


def test_what_the_client_finds_fails(folder):
    result = validate(make("fan_out", compute="nowhere"))
    assert not result.passed
    assert "there is no compute 'nowhere'" in str(result.error_messages)


@pytest.mark.parametrize("placement", ["fan_out", "service", "gang"])
def test_looking_at_a_job_while_a_pipeline_is_built_leaves_the_pipeline_alone(folder, placement):
    plain = command(command="python train.py", environment="e:1", compute="gpu")
    resources = ElasticResources(max_instance_count=2, placement=placement)

    @dsl.pipeline(compute="gpu")
    def only_mine():
        job = make(placement)
        entity = job.compile()
        assert (str(entity), str(job), job._repr_html_()) != ("", "", "")
        assert validate(job).passed
        assert not validate(make(placement, command="python nowhere.py")).passed
        ElasticCommandJob.from_command(plain, resources=resources).compile()
        mine = plain()
        mine.name = "mine"

    assert list(only_mine().jobs) == ["mine"]


def test_a_compiled_job_is_a_step_where_it_is_called(folder):
    entity = make("gang").compile()

    @dsl.pipeline(compute="gpu")
    def two_steps():
        for at in range(2):
            entity(**{name: getattr(value, "_data", value) for name, value in entity.inputs.items()}).name = f"s{at}"

    assert list(two_steps().jobs) == ["s0", "s1"]


def test_other_jobs_are_validated_as_before(folder):
    assert validate(command(command="python train.py", environment="e:1", compute="gpu")).passed


def test_registering_again_changes_nothing():
    before = JobOperations.validate
    sdk_hooks.register(ElasticCommandJob)
    assert JobOperations.validate is before
