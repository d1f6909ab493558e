"""Pipelines with data between their steps, sweeps and schedules, and the lists of a workspace, by the real client."""

import contextlib
from pathlib import Path

import pytest
from azure.ai.ml import Input, Output, command, dsl
from azure.ai.ml.constants import ListViewType
from azure.ai.ml.entities import CronTrigger, Data, JobSchedule, JupyterLabJobService
from azure.ai.ml.exceptions import JobException
from azure.ai.ml.sweep import BanditPolicy, Choice, Uniform
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from typer.testing import CliRunner

from azureml_elastic.cli.app import app
from azureml_elastic.errors import UsageError
from azureml_elastic.testing import LocalWorkspace, Pool
from tests.support.waiting import until

SHARED = "azureml://datastores/workspaceblobstore/paths/shared-by-trials/"
LOG_METRIC = """
import json, os, sys, urllib.request
def log(key, value):
    body = json.dumps({"run_id": os.environ["MLFLOW_RUN_ID"], "key": key, "value": value, "timestamp": 0, "step": 0})
    url = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/log-metric"
    headers = {"Authorization": "Bearer token", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).read()
if sys.argv[1] != "0.3":  # the best one by far, were it not to fail
    log("loss", (float(sys.argv[1]) - 0.2) ** 2)
else:
    log("loss", -1)
    sys.exit("this trial fails")
"""


def step(text, **fields):
    return command(command=text, environment="anything@latest", compute="cluster", **fields)


FOLDER = {"data": Input(type="uri_folder")}
prepare = step("echo ${{inputs.word}} > ${{outputs.out}}/a.txt", inputs={"word": "none"}, outputs={"out": Output()})
train = step(
    "cat ${{inputs.data}}/a.txt > ${{outputs.model}} && echo root $AZUREML_ROOT_RUN_ID",
    inputs=FOLDER,
    outputs={"model": Output(type="uri_file")},
)
both = step(
    "cat ${{inputs.first}} ${{inputs.second}} > ${{outputs.report}}/r.txt",
    inputs=dict.fromkeys(("first", "second"), Input(type="uri_file")),
    outputs={"report": Output(type="uri_folder", mode="upload")},
)


@pytest.fixture(scope="module")
def workspace():
    with LocalWorkspace(pools={"cluster": Pool(nodes=4), "small": Pool(nodes=1)}) as workspace:
        yield workspace


@pytest.fixture
def client(workspace):
    return workspace.ml_client


def states(client, name):
    return {child.display_name: child.status for child in client.jobs.list(parent_job_name=name)}


def test_steps_run_when_what_they_read_is_there_and_the_pipelines_outputs_are_downloaded(client, workspace, tmp_path):
    @dsl.pipeline
    def inner(data: Input(type="uri_folder")):
        node = train(data=data)
        return {"model": node.outputs.model}

    @dsl.pipeline(compute="cluster")
    def outer(word: str):
        source = prepare(word=word)
        one = inner(data=source.outputs.out)
        two = train(data=source.outputs.out)
        last = both(first=one.outputs.model, second=two.outputs.model)
        last.inputs.first.mode = "download"
        return {"report": last.outputs.report, "model": two.outputs.model}

    name = client.jobs.create_or_update(outer(word="hello")).name
    client.jobs.stream(name)
    assert states(client, name) == dict.fromkeys(("last", "source", "one", "two"), "Completed")
    (one,) = [child for child in client.jobs.list(parent_job_name=name) if child.display_name == "one"]
    (inside,) = client.jobs.list(parent_job_name=one.name)
    assert workspace.log(inside.name) == f"root {name}\n"
    client.jobs.download(name, download_path=tmp_path, output_name="report")
    client.jobs.download(name, download_path=tmp_path, output_name="model")
    files = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"r.txt": "hello\nhello\n", "model": "hello\n"}
    client.jobs.download(one.name, download_path=tmp_path / "one", output_name="model")
    assert (tmp_path / "one" / "named-outputs" / "model" / "model").read_text() == "hello\n"


@pytest.mark.parametrize(("continues", "beside"), [(False, "Canceled"), (True, "Completed")])
def test_what_a_failed_step_should_have_written_is_read_by_nobody(client, continues, beside):
    fails = step("echo 'the reason'; exit 3", outputs={"out": Output()})
    waits = step(
        "echo ran > ${{outputs.out}}/x; test ${{inputs.seconds}} = 0 || sleep 1000",
        inputs={"seconds": 0},
        outputs={"out": Output()},
    )

    @dsl.pipeline(compute="cluster")
    def pipeline():
        first = fails()
        second = train(data=first.outputs.out)
        both(first=second.outputs.model, second=second.outputs.model).name = "third"
        waits(seconds=0 if continues else 1).name = "other"

    job = pipeline()
    job.settings.continue_on_step_failure = continues
    name = client.jobs.create_or_update(job).name
    with (
        pytest.raises(JobException, match=r'The step first failed[^"]*the reason')
        if not continues
        else contextlib.nullcontext()
    ):
        client.jobs.stream(name)
    expected = {"first": "Failed", "second": "Canceled", "third": "Canceled", "other": beside}
    assert states(client, name) == expected


def test_steps_of_a_cancelled_pipeline_never_start(client, workspace):
    slow = step("sleep 1000", outputs={"out": Output()})

    @dsl.pipeline(compute="cluster")
    def pipeline():
        first = slow()
        train(data=first.outputs.out).name = "train"

    name = client.jobs.create_or_update(pipeline()).name
    until(lambda: states(client, name)["first"] == "Running", interval=0.05)
    assert states(client, name)["train"] == "NotStarted"
    client.jobs.begin_cancel(name)
    assert workspace.wait(name, 60) == "Canceled"
    assert states(client, name) == {"first": "Canceled", "train": "Canceled"}
    assert client.jobs.get(name).status == "Canceled"


def test_what_no_pipeline_here_can_be_is_refused(client):
    @dsl.pipeline(compute="cluster")
    def pipeline(number: int):
        node = step("true")()
        node.resources = {"instance_count": number}

    job = pipeline(number=9)
    with pytest.raises(HttpResponseError, match="above the limit of 4"):
        client.jobs.create_or_update(job)
    job.settings.default_datastore = "elsewhere"
    with pytest.raises(HttpResponseError, match="elsewhere"):
        client.jobs.create_or_update(job)


def sweep(text, space, *, code=None, outputs=None, **options):
    job = step(text, code=code, inputs=dict.fromkeys(space, 0.0), outputs=outputs)
    return job(**space).sweep(primary_metric="loss", goal="Minimize", **options)


def test_trials_of_a_sweep_run_one_after_the_other_and_the_best_one_is_downloaded(client, workspace, script, tmp_path):
    script(LOG_METRIC)
    text = "echo began >> ${{outputs.shared}}/times; echo ${{inputs.lr}} > ${{outputs.model}}/lr && "
    text += "python train.py ${{inputs.lr}}; code=$?; echo ended >> ${{outputs.shared}}/times; exit $code"
    outputs = {"shared": Output(type="uri_folder", mode="rw_mount", path=SHARED), "model": Output(type="uri_folder")}
    job = sweep(text, {"lr": Choice([0.1, 0.15, 0.3])}, sampling_algorithm="grid", code="src", outputs=outputs)
    job.set_limits(max_total_trials=10, max_concurrent_trials=1)
    name = client.jobs.create_or_update(job).name
    client.jobs.stream(name)
    trials = list(client.jobs.list(parent_job_name=name))
    assert [trial.name for trial in trials] == [f"{name}_0", f"{name}_1", f"{name}_2"]
    assert [trial.status for trial in trials] == ["Completed", "Completed", "Failed"]
    assert [trial.tags["hyperparameters"] for trial in trials] == [f'{{"lr": "{lr}"}}' for lr in (0.1, 0.15, 0.3)]
    found = client.jobs.get(name)
    assert (found.type, found.status) == ("sweep", "Completed")
    assert found.properties["best_child_run_id"] == f"{name}_1"
    assert float(found.properties["score"]) == pytest.approx(0.0025)
    client.jobs.download(name, download_path=tmp_path, output_name="model")
    assert (tmp_path / "named-outputs" / "model" / "lr").read_text() == "0.15\n"
    client.jobs.download(name, download_path=tmp_path, output_name="shared")
    times = (tmp_path / "named-outputs" / "shared" / "times").read_text().split()
    assert times == ["began", "ended"] * 3


def test_a_sweep_is_a_step_whose_outputs_are_those_of_its_best_trial(client, workspace, script, tmp_path):
    script(LOG_METRIC)
    text = "echo ${{inputs.lr}} ${{inputs.word}} > ${{outputs.model}} && python train.py ${{inputs.lr}}"
    tried = step(text, code="src", inputs={"lr": 0.0, "word": "x"}, outputs={"model": Output(type="uri_file")})

    @dsl.pipeline(compute="cluster")
    def pipeline(word: str):
        search = tried(lr=Choice([0.1, 0.15, 0.3]), word=word).sweep(
            primary_metric="loss", goal="Minimize", sampling_algorithm="grid"
        )
        search.set_limits(max_total_trials=3, timeout=600)
        last = both(first=search.outputs.model, second=search.outputs.model)
        return {"report": last.outputs.report}

    name = client.jobs.create_or_update(pipeline(word="hello")).name
    # A failed trial fails neither the sweep nor the pipeline.
    assert workspace.wait(name, 60) == "Completed"
    assert states(client, name) == {"search": "Completed", "last": "Completed"}
    client.jobs.download(name, download_path=tmp_path, output_name="report")
    (report,) = tmp_path.rglob("r.txt")
    assert report.read_text() == "0.15 hello\n" * 2
    (search,) = [child.name for child in client.jobs.list(parent_job_name=name) if child.display_name == "search"]
    assert client.jobs.get(search).properties["best_child_run_id"] == f"{search}_1"
    assert list(states(client, search).values()) == ["Completed", "Completed", "Failed"]


def test_a_sweep_is_cancelled_with_its_trials_and_begins_no_further_ones(client, workspace):
    job = sweep("echo ${{inputs.lr}}; sleep 1000", {"lr": Uniform(0, 1)}, sampling_algorithm="random")
    job.set_limits(max_total_trials=100, max_concurrent_trials=2)
    name = client.jobs.create_or_update(job).name
    until(lambda: list(states(client, name).values()) == ["Running", "Running"], interval=0.05)
    client.jobs.begin_cancel(name)
    assert workspace.wait(name, 60) == "Canceled"
    assert list(states(client, name).values()) == ["Canceled", "Canceled"]


def test_a_sweep_whose_trials_all_fail_has_failed_and_one_without_metrics_has_no_best(client, workspace):
    failing, silent = (sweep(f"{text} ${{{{inputs.lr}}}}", {"lr": Choice([1, 2])}) for text in ("false", "true"))
    for job in (failing, silent):
        job.set_limits(max_total_trials=2)
    first, second = (client.jobs.create_or_update(job).name for job in (failing, silent))
    assert [workspace.wait(name, 60) for name in (first, second)] == ["Failed", "Completed"]
    with pytest.raises(JobException, match=f"The trial {first}_0 failed"):
        client.jobs.stream(first)
    assert "best_child_run_id" not in client.jobs.get(second).properties


def test_a_sweep_that_would_end_trials_early_is_refused_and_so_is_the_report_of_one(client, workspace, tmp_path):
    job = sweep("true ${{inputs.lr}}", {"lr": Choice([1])}, early_termination_policy=BanditPolicy(slack_factor=0.1))
    job.set_limits(max_total_trials=1)
    with pytest.raises(UsageError, match="several runs"):
        workspace.run(job, tmp_path / "run")
    with pytest.raises(HttpResponseError, match="ends no trial early"):
        client.jobs.create_or_update(job)


def test_each_trigger_of_a_schedule_is_a_job_of_its_own_until_it_is_disabled_and_deleted(
    client, workspace, monkeypatch
):
    @dsl.pipeline(compute="cluster")
    def pipeline(word: str):
        source = prepare(word=word)
        train(data=source.outputs.out)

    schedules = client.schedules
    trigger = CronTrigger(expression="15 10 * * 1")
    made = schedules.begin_create_or_update(JobSchedule(name="s", trigger=trigger, create_job=pipeline(word="a")))
    assert made.result().is_enabled
    assert schedules.get("s").provisioning_state == "Succeeded"
    jobs = [schedules.trigger("s").job_name for _ in range(2)]
    assert [workspace.wait(job, 60) for job in jobs] == ["Completed", "Completed"]
    assert [job.name for job in client.jobs.list(scheduled_job_name="s")] == jobs
    again = JobSchedule(name="again", trigger=trigger, create_job=client.jobs.get(jobs[0]).id)
    schedules.begin_create_or_update(again).result()
    for variable, value in workspace.variables.items():
        monkeypatch.setenv(variable, value)
    triggered = CliRunner().invoke(app, ["workspace", "trigger", "again"])
    assert workspace.wait(triggered.stdout.strip(), 60) == "Completed", triggered.output
    refused = CliRunner().invoke(app, ["workspace", "trigger", "none"])
    assert (refused.exit_code, "no schedule 'none'" in " ".join(refused.output.split())) == (2, True)
    with pytest.raises(HttpResponseError, match="Disable it first"):
        schedules.begin_delete("s").result()
    assert not schedules.begin_disable("s").result().is_enabled
    with pytest.raises(HttpResponseError, match="Enable it first"):
        schedules.trigger("s")
    assert [held.name for held in schedules.list()] == ["again"]
    assert [held.name for held in schedules.list(list_view_type="DisabledOnly")] == ["s"]
    schedules.begin_delete("s").result()
    with pytest.raises(ResourceNotFoundError, match="no schedule 's'"):
        schedules.get("s")
    elsewhere = pipeline(word="a")
    elsewhere.settings.default_datastore = "elsewhere"
    with pytest.raises(HttpResponseError, match="elsewhere"):
        schedules.begin_create_or_update(JobSchedule(name="no", trigger=trigger, create_job=elsewhere)).result()


def test_archived_jobs_are_in_the_list_of_archived_ones_alone(client, workspace):
    single = client.jobs.create_or_update(step("true", services={"lab": JupyterLabJobService()})).name

    @dsl.pipeline(compute="cluster")
    def pipeline():
        prepare(word="a")

    several = client.jobs.create_or_update(pipeline()).name
    assert [workspace.wait(name, 60) for name in (single, several)] == ["Completed", "Completed"]
    (lab,) = client.jobs.show_services(single).values()
    assert (lab.status, lab.error) == ("Failed", "The local workspace starts no interactive services.")
    assert client.jobs.show_services(several) is None
    for name in (single, several):
        client.jobs.archive(name)
        assert name not in [job.name for job in client.jobs.list()]
        assert [job.name for job in client.jobs.list(list_view_type=ListViewType.ARCHIVED_ONLY)] == [name]
        assert name in [job.name for job in client.jobs.list(list_view_type=ListViewType.ALL)]
        client.jobs.restore(name)
        assert name in [job.name for job in client.jobs.list()]


def test_data_is_listed_by_name_and_by_version_and_read_by_jobs(client, workspace):
    Path("folder").mkdir()
    Path("folder/x").write_text("first")
    assert list(client.data.list()) == []
    first = client.data.create_or_update(Data(name="mine", path="folder", type="uri_folder"))
    Path("folder/x").write_text("second")
    second = client.data.create_or_update(Data(name="mine", path="folder", type="uri_folder"))
    client.data.create_or_update(Data(name="file", version="a", path="folder/x", type="uri_file"))
    assert (first.version, second.version) == ("1", "2")
    listed = [(data.name, data.latest_version, data.type) for data in client.data.list()]
    assert listed == [("mine", "2", "uri_folder"), ("file", "a", "uri_file")]
    assert [data.version for data in client.data.list("mine")] == ["2", "1"]
    reads = step("cat ${{inputs.d}}/x", inputs={"d": Input(type="uri_folder", path="mine@latest")})
    job = client.jobs.create_or_update(reads)
    assert workspace.wait(job.name, 60) == "Completed"
    assert workspace.log(job.name) == "second"
    client.data.archive("mine", "1")
    assert [data.version for data in client.data.list("mine")] == ["2"]
    client.data.archive("file")
    assert [data.name for data in client.data.list()] == ["mine"]
    client.data.restore("file")
    assert [data.name for data in client.data.list()] == ["mine", "file"]
    with pytest.raises(HttpResponseError, match="does not support GET"):
        list(client.online_endpoints.list())
