"""Jobs that the real client submits to the local workspace."""

import json
import os
import threading
from pathlib import Path

import psutil
import pytest
from azure.ai.ml import Input, Output, command, dsl
from azure.ai.ml.entities import Data, Model
from azure.ai.ml.exceptions import JobException
from azure.core.exceptions import HttpResponseError

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import UsageError
from azureml_elastic.submit import ElasticCommandJob
from azureml_elastic.testing import LocalWorkspace, Pool
from tests.support.waiting import until

SHARED = "azureml://datastores/workspaceblobstore/paths/shared/"
TELL = """
import json, os, sys
from pathlib import Path
record = {"argv": sys.argv[1:], "environment": dict(os.environ), "beside": Path("beside.txt").read_text()}
record["data"] = Path(sys.argv[1], "a.txt").read_text()
Path(sys.argv[2], "record.json").write_text(json.dumps(record))
Path("outputs").mkdir()
Path("outputs/artifact.txt").write_text("kept")
print("said")
"""


def make(text, **fields):
    return command(command=text, environment="anything@latest", compute="cluster", **fields)


def downloaded(client, name, folder="downloaded"):
    client.jobs.download(name, download_path=folder, all=True)
    return {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """One workspace for the tests that do not disturb each other, whose folder is relative to another than theirs."""
    pools = {"cluster": Pool(nodes=4), "small": Pool(nodes=1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("from"))
        workspace = LocalWorkspace(pools=pools, folder="the files")
    with workspace:
        yield workspace


@pytest.fixture
def client(workspace):
    return workspace.ml_client


def test_a_job_finds_its_code_its_inputs_and_its_environment_and_its_outputs_are_downloaded(
    client, workspace, project, script, capfd
):
    script(TELL)
    script("in the code", "beside.txt")
    (project / "data").mkdir()
    (project / "data" / "a.txt").write_text("the data")
    job = client.jobs.create_or_update(
        make(
            "python train.py ${{inputs.data}} ${{outputs.model}} --lr ${{inputs.lr}} && echo after",
            code="src",
            inputs={"data": Input(type="uri_folder", path="data", mode="download"), "lr": 0.5},
            outputs={"model": Output(type="uri_folder")},
            environment_variables={"MINE": "1"},
            experiment_name="exp",
        )
    )
    client.jobs.stream(job.name)
    assert client.jobs.get(job.name).status == "Completed"
    assert job.name in [known.name for known in client.jobs.list()]
    files = downloaded(client, job.name)
    record = json.loads(files["named-outputs/model/record.json"].read_text())
    assert record["data"] == "the data"
    assert record["beside"] == "in the code"
    assert record["argv"][2:] == ["--lr", "0.5"]
    assert files["artifacts/outputs/artifact.txt"].read_text() == "kept"
    assert files["artifacts/user_logs/std_log.txt"].read_text() == workspace.log(job.name) == "said\nafter\n"
    environment = record["environment"]
    expected = {
        "AZUREML_RUN_ID": job.name,
        "AZUREML_ROOT_RUN_ID": job.name,
        "AZUREML_ARM_WORKSPACE_NAME": "local",
        "AZUREML_ARM_PROJECT_NAME": "exp",
        "AZURE_ML_INPUT_lr": "0.5",
        "AZURE_ML_INPUT_data": record["argv"][0],
        "AZURE_ML_OUTPUT_model": record["argv"][1],
        "MINE": "1",
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert json.loads(environment["AZUREML_CR_COMPUTE_CONTEXT"])["vm_priority"] == "low_priority"
    assert "WORLD_SIZE" not in environment
    assert "PYTEST_CURRENT_TEST" not in environment


def test_a_step_of_a_pipeline_is_a_job_of_its_own_and_writes_where_the_others_read(client, project, script):
    script(
        "import os, sys; from pathlib import Path\n"
        "Path(sys.argv[1], sys.argv[2]).write_text(os.environ['AZUREML_RUN_ID'])"
    )
    step = command(
        command="python train.py ${{outputs.shared}} ${{inputs.word}}",
        code="src",
        environment="anything@latest",
        inputs={"word": Input(type="string")},
        outputs={"shared": Output(type="uri_folder", mode="rw_mount", path=SHARED)},
    )

    @dsl.pipeline
    def both(word):
        step(word=word)
        step(word="second")

    pipeline = both(word="first")
    pipeline.settings.default_compute = "cluster"
    job = client.jobs.create_or_update(pipeline, experiment_name="exp")
    client.jobs.stream(job.name)
    assert client.jobs.get(job.name).status == "Completed"
    children = list(client.jobs.list(parent_job_name=job.name))
    assert [child.status for child in children] == ["Completed", "Completed"]
    files = downloaded(client, children[0].name)
    names = {child.name for child in children}
    assert {files[f"named-outputs/shared/{word}"].read_text() for word in ("first", "second")} == names


def test_nodes_of_one_job_know_of_each_other(client, workspace, script):
    script(
        "import os; names = ['NODE_RANK', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR']\n"
        "print(*(os.environ[name] for name in names))"
    )
    job = client.jobs.create_or_update(
        make(
            "python train.py",
            code="src",
            instance_count=2,
            distribution={"type": "pytorch", "process_count_per_instance": 2},
        )
    )
    assert workspace.wait(job.name, 60) == "Completed"
    lines = [line.split() for line in workspace.log(job.name).splitlines()]
    assert [line[:4] for line in lines] == [
        ["0", "0", "0", "4"],
        ["0", "1", "1", "4"],
        ["1", "2", "0", "4"],
        ["1", "3", "1", "4"],
    ]
    assert len({line[4] for line in lines}) == 1


def test_outputs_of_a_job_are_registered_as_models_and_data_and_read_by_others(client, workspace):
    text = "echo trained > ${{outputs.model}}/a.txt; mkdir outputs; echo kept > outputs/b.txt"
    job = client.jobs.create_or_update(make(text, outputs={"model": Output(type="custom_model")}))
    assert workspace.wait(job.name, 60) == "Completed"
    written, kept = (f"azureml://jobs/{job.name}/outputs/{each}" for each in ("model", "artifacts/paths/outputs/"))
    model = client.models.create_or_update(Model(name="m", path=written, type="custom_model"))
    assert (model.path, client.models.get("m", label="latest").version) == (written, "1")
    data = client.data.create_or_update(Data(name="d", path=kept, type="uri_folder"))
    inputs = {
        "model": Input(type="custom_model", path=model.id),
        "output": Input(type="uri_folder", path=written),
        "file": Input(type="uri_file", path=f"{written}/paths/a.txt", mode="download"),
        "data": Input(type="uri_folder", path=f"{data.name}@latest"),
    }
    text = "cat ${{inputs.model}}/a.txt ${{inputs.output}}/a.txt ${{inputs.file}} ${{inputs.data}}/b.txt"
    reader = client.jobs.create_or_update(make(text, inputs=inputs))
    assert workspace.wait(reader.name, 60) == "Completed"
    assert workspace.log(reader.name).split() == ["trained", "trained", "trained", "kept"]
    wrong = f"azureml://jobs/{job.name}/outputs/nothing"
    with pytest.raises(HttpResponseError, match="is not in the local workspace"):
        client.jobs.create_or_update(make("true", inputs={"a": Input(type="uri_folder", path=wrong)}))


def test_the_default_version_of_a_component_is_the_newest(client):
    for version in ("1", "2"):
        component = make("echo ${{inputs.a}}", inputs={"a": Input(type="number")}, name="shown").component
        component.version = version
        client.components.create_or_update(component)
    assert client.components.get("shown").version == "2"


@pytest.mark.parametrize("name", ["logs", "mirror", "nodes"])
def test_a_folder_with_the_files_of_a_workspace_is_refused(tmp_path, name):
    (tmp_path / "kept" / name / "a").mkdir(parents=True)
    workspace = LocalWorkspace(folder=str(tmp_path / "kept"))
    with pytest.raises(UsageError, match=f"kept has the {name} of an earlier workspace.*another folder"), workspace:
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/kept cannot be created"), LocalWorkspace(folder=tmp_path / "file/kept"):
        pass


def test_the_log_of_a_command_job_is_streamed(client, capsys, monkeypatch, tmp_path):
    def begun(_):  # the log of a job that has ended before is not streamed
        (tmp_path / "go").touch()
        return 0.1

    monkeypatch.setattr("azure.ai.ml.operations._job_ops_helper._wait_before_polling", begun)
    wait = f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.05; done"
    job = client.jobs.create_or_update(make(f"echo first; {wait}; echo last"))
    client.jobs.stream(job.name)
    assert "\nfirst\nlast\n" in capsys.readouterr().out


def test_a_failed_job_reports_the_last_output_of_its_command(client):
    job = client.jobs.create_or_update(make("echo before; echo 'the reason' >&2; exit 7"))
    with pytest.raises(JobException, match=r"exited with status code 7[^\"]*the reason"):
        client.jobs.stream(job.name)
    assert client.jobs.get(job.name).status == "Failed"


def test_a_command_with_an_unknown_output_fails(client, workspace):
    job = client.jobs.create_or_update(make("echo ${{outputs.nothing}}"))
    assert workspace.wait(job.name, 60) == "Failed"
    with pytest.raises(JobException, match="refers to no value"):
        client.jobs.stream(job.name)


def test_a_cancelled_job_is_ended_with_all_that_it_has_started(client, workspace):
    job = client.jobs.create_or_update(make("sleep 1000 & sleep 1001"))
    until(lambda: client.jobs.get(job.name).status == "Running", interval=0.05)
    client.jobs.begin_cancel(job.name)
    assert workspace.wait(job.name, 60) == "Canceled"
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "1001"]]


def test_a_job_waits_for_a_machine(client, workspace):
    first = client.jobs.create_or_update(make("sleep 1000"), compute="small")
    second = client.jobs.create_or_update(make("true"), compute="small")
    until(lambda: client.jobs.get(first.name).status == "Running", interval=0.05)
    assert client.jobs.get(second.name).status == "Queued"
    client.jobs.begin_cancel(first.name)
    assert workspace.wait(second.name, 60) == "Completed"


def test_a_job_that_takes_too_long_is_cancelled(client, workspace):
    job = make("sleep 1000")
    job.set_limits(timeout=1)
    name = client.jobs.create_or_update(job).name
    assert workspace.wait(name, 60) == "Canceled"


def test_what_cannot_be_run_is_refused_with_a_reason(client):
    with pytest.raises(HttpResponseError, match="no compute 'nowhere'"):
        client.jobs.create_or_update(make("true"), compute="nowhere")
    with pytest.raises(HttpResponseError, match="above the limit of 1"):
        client.jobs.create_or_update(make("true", instance_count=2), compute="small")
    with pytest.raises(HttpResponseError, match="not in the local workspace"):
        client.jobs.create_or_update(
            make("true", inputs={"data": Input(type="uri_folder", path="https://example.com/data")})
        )


@pytest.mark.parametrize(("compute", "passes"), [("cluster", True), ("nowhere", False)])
def test_an_elastic_job_is_validated_without_being_submitted(client, project, compute, passes):
    Path("train.py").write_text("print(1)\n")
    nodes = ElasticResources(max_instance_count=2)
    job = ElasticCommandJob(command="python train.py", code=".", environment="e:1", compute=compute, resources=nodes)
    result = client.jobs.validate(job)
    assert result.passed == passes, result.error_messages
    assert "nowhere" in str(result.error_messages) or passes


def test_a_node_gets_tokens_and_reads_the_workspace_as_on_azure(client, workspace, script):
    script("""
import json, os, urllib.request
with urllib.request.urlopen(os.environ["MSI_ENDPOINT"] + "?resource=https://management.azure.com") as answer:
    token = json.load(answer)["access_token"]
scope = [os.environ["AZUREML_ARM_" + name] for name in ("SUBSCRIPTION", "RESOURCEGROUP", "WORKSPACE_NAME")]
path = "/subscriptions/{}/resourceGroups/{}/providers/Microsoft.MachineLearningServices/workspaces/{}".format(*scope)
request = urllib.request.Request("https://management.azure.com" + path, headers={"Authorization": "Bearer " + token})
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["properties"]["storageAccount"])
""")
    job = client.jobs.create_or_update(make("python train.py", code="src"))
    assert workspace.wait(job.name, 60) == "Completed", workspace.log(job.name)
    assert workspace.log(job.name).strip().endswith("/storageAccounts/devstoreaccount1")


def test_a_workspace_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("AZUREML_CURRENT_CLOUD", "AzureCloud")  # azure-ai-ml sets it when it is first used
    environment, threads = dict(os.environ), set(threading.enumerate())
    with LocalWorkspace() as workspace:
        job = workspace.ml_client.jobs.create_or_update(make("sleep 1000 & sleep 1002"))
        until(lambda: workspace.ml_client.jobs.get(job.name).status == "Running", interval=0.05)
        folder = Path(os.environ["REQUESTS_CA_BUNDLE"]).parent
    assert dict(os.environ) == environment
    assert set(threading.enumerate()) <= threads
    assert not folder.exists()
    assert workspace.wait(job.name) == "Canceled"
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "1002"]]
    with pytest.raises(UsageError, match="not open"):
        workspace.ml_client  # noqa: B018


def test_an_unknown_pool_cannot_be_refilled():
    with pytest.raises(UsageError, match="no pool 'spto'"):
        LocalWorkspace(pools={"spot": Pool()}).refill("spto")
