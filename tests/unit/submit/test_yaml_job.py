"""A job as a YAML file with one ``elastic:`` block."""

import traceback
from datetime import timedelta

import pytest
import yaml
from azure.ai.ml import load_job

from azureml_elastic.config import (
    CheckpointPolicy,
    ElasticDistribution,
    ElasticResources,
    FixedPerWorkerBatch,
    NodePool,
)
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit import ElasticCommandJob, load_elastic_job
from azureml_elastic.submit.sdk_hooks import fields_of_command
from azureml_elastic.submit.yaml.elastic_block import block_model

SHORTEST = "elastic:\n  max_instance_count: 4"
STANDARD = """
$schema: https://azuremlschemas.azureedge.net/latest/commandJob.schema.json
type: command
code: src
command: pip list && torchrun --nproc_per_node 4 train.py --data ${{inputs.data}} --lr ${{inputs.lr}}
environment:
  image: image:1
  conda_file: ../conda.yml
compute: azureml:gpu
inputs:
  data: {type: uri_folder, path: ../data, mode: ro_mount}
  table: {type: uri_file, path: "azureml:table:3"}
  lr: 0.1
  flag: true
  text: "1"
outputs:
  model: {type: uri_folder, mode: upload}
environment_variables: {A: 1, B: x, C: ""}
resources: {instance_count: 3, shm_size: 8g, docker_args: "--ipc host"}
limits: {timeout: 60}
identity: {type: user_identity}
services:
  board: {type: tensor_board, log_dir: outputs/tb}
queue_settings: {job_tier: spot, priority: High}
tags: {a: b}
properties: {p: q}
name: run-1
display_name: shown
experiment_name: tried
description: a test
"""
BLOCK = """
elastic:
  min_instance_count: 2
  max_instance_count: 8
  placement: fan_out
  distribution: {max_restarts: 5}
  health: {hang_timeout: 10m}
  rendezvous: {table: mine}
  checkpoint: {every: 600, keep: 3}
  batch: {kind: fixed_per_worker, scaling: linear, reference_world_size: 4}
  delivery: environment
  audit: true
"""
MINIMAL = {"command": "python train.py", "code": "src", "environment": "azureml:env:1", "compute": "azureml:gpu"}


@pytest.fixture
def project(folder, tmp_path, monkeypatch):
    """A project whose job file is in a folder of its own, and a current folder somewhere else."""
    (folder / "conda.yml").write_text("name: a\ndependencies: [python]\n")
    (folder / "jobs" / "src").mkdir(parents=True)
    (folder / "jobs" / "src" / "train.py").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return folder


@pytest.fixture
def write(project):
    """Write a job file and return its path: from text, or from fields besides the shortest ones."""

    def to_file(text=None, **fields):
        path = project / "jobs" / "job.yml"
        document = {**MINIMAL, "elastic": {"max_instance_count": 4}, **fields}
        present = {name: value for name, value in document.items() if value is not ...}
        path.write_text(yaml.safe_dump(present) if text is None else text)
        return path

    return to_file


def refused(path, *overrides, kind=SubmitError):
    with pytest.raises(kind) as caught:
        load_elastic_job(path, overrides)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path)).lstrip(":, ")


def test_a_whole_job(write, project):
    job = load_elastic_job(write(STANDARD + BLOCK))
    assert job.command == "pip list && python train.py --data ${{inputs.data}} --lr ${{inputs.lr}}"
    assert job.code == str(project / "jobs" / "src")
    assert job.resources == ElasticResources(
        min_instance_count=2, max_instance_count=8, placement="fan_out", shm_size="8g", docker_args="--ipc host"
    )
    assert job.distribution.process_count_per_instance == 4
    assert (job.distribution.max_restarts, job.health.hang_timeout) == (5, timedelta(minutes=10))
    assert job.rendezvous.table == "mine"
    assert job.checkpoint == CheckpointPolicy(every=600, keep=3)
    assert job.batch == FixedPerWorkerBatch(scaling="linear", reference_world_size=4)
    assert (job.delivery, job.audit) == ("environment", True)
    assert (job.compute, job.job_tier, job.priority, job.timeout) == ("gpu", "Spot", "high", timedelta(minutes=1))
    assert (job.name, job.display_name, job.experiment_name) == ("run-1", "shown", "tried")
    assert job.environment_variables == {"A": "1", "B": "x", "C": ""}
    assert (job.inputs["lr"], job.inputs["flag"], job.inputs["text"]) == (0.1, True, "1")
    assert job.environment.conda_file == {"name": "a", "dependencies": ["python"]}


def test_the_standard_part_means_what_it_does_for_azure_ai_ml(write, project, client, sent, components):
    """Submitted, it is the same as what from_command makes of the file without its block."""
    path = write(STANDARD + BLOCK)
    client.jobs.create_or_update(load_elastic_job(path))
    (project / "jobs" / "standard.yml").write_text(STANDARD)
    client.jobs.create_or_update(
        ElasticCommandJob.from_command(
            load_job(project / "jobs" / "standard.yml"),
            resources={"min_instance_count": 2, "max_instance_count": 8, "placement": "fan_out"},
            distribution=ElasticDistribution(process_count_per_instance=4, max_restarts=5),
            rendezvous={"table": "mine"},
            health={"hang_timeout": 600},
            checkpoint=CheckpointPolicy(every=600, keep=3),
            batch=FixedPerWorkerBatch(scaling="linear", reference_world_size=4),
            delivery="environment",
            audit=True,
        )
    )
    first, second = sent()
    assert first == second
    assert components()[0] == components()[-1]


@pytest.mark.parametrize("reference", ["file:../environment.yml", {"build": {"path": "../docker"}}])
def test_environments_in_files_and_folders_are_found_from_the_job_file(write, project, client, workspace, reference):
    (project / "environment.yml").write_text("image: image:2\nconda_file: conda.yml\n")
    (project / "docker").mkdir()
    (project / "docker" / "Dockerfile").write_text("FROM image:3\n")
    client.jobs.create_or_update(load_elastic_job(write(environment=reference)))
    (environment,) = [one for key, one in workspace.entities.items() if key.startswith("/environments/")]
    if isinstance(reference, str):
        assert environment["properties"]["image"] == "image:2"
        assert yaml.safe_load(environment["properties"]["condaFile"])["dependencies"] == ["python"]
    else:
        assert "/docker" in environment["properties"]["build"]["contextUri"]


def test_overrides_go_before_what_the_file_says(write):
    job = load_elastic_job(
        write(),
        [
            "elastic.max_instance_count=12",
            "elastic.checkpoint.every=auto",
            "inputs.lr=0.5",
            "environment_variables.A=1",
            "resources.shm_size=16g",
        ],
    )
    assert (job.resources.max_instance_count, job.resources.shm_size) == (12, "16g")
    assert job.checkpoint.every == "auto"
    assert (job.inputs, job.environment_variables) == ({"lr": 0.5}, {"A": "1"})


@pytest.mark.parametrize(
    ("block", "resources", "wanted"),
    [
        ({"max_instance_count": 4}, ..., {"max_instance_count": 4}),
        ({"max_instance_count": 4}, {"instance_count": 9}, {"max_instance_count": 4}),
        (None, {"instance_count": 3}, {"max_instance_count": 3}),
        ({}, {"instance_count": 3}, {"max_instance_count": 3}),
        ({}, {"instance_count": 2, "max_instance_count": 5}, {"min_instance_count": 2, "max_instance_count": 5}),
        ({"min_instance_count": 2}, {"instance_count": 3}, {"min_instance_count": 2, "max_instance_count": 3}),
        ({"placement": "gang"}, {"instance_count": 3}, {"max_instance_count": 3, "placement": "gang"}),
        ({"max_instance_count": 1}, ..., {"max_instance_count": 1}),
    ],
)
def test_the_node_counts(write, block, resources, wanted):
    assert load_elastic_job(write(elastic=block, resources=resources)).resources == ElasticResources(**wanted)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {}),
        ({"distribution": {"type": "pytorch", "process_count_per_instance": 2}}, {"process_count_per_instance": 2}),
        ({"block": {"max_restarts": 7}}, {"max_restarts": 7}),
        (
            {
                "block": {"max_restarts": 7},
                "distribution": {"type": "pytorch", "process_count_per_instance": 2},
            },
            {"max_restarts": 7, "process_count_per_instance": 2},
        ),
        (
            {"block": {"max_restarts": 7}, "command": "torchrun --nproc_per_node 2 --max-restarts 1 train.py"},
            {"max_restarts": 7, "process_count_per_instance": 2},
        ),
        (
            {
                "block": {"process_count_per_instance": 8},
                "distribution": {"type": "pytorch", "process_count_per_instance": 2},
            },
            {"process_count_per_instance": 8},
        ),
        (
            {"block": {"process_count_per_instance": 8}, "distribution": {"type": "mpi"}},
            {"process_count_per_instance": 8},
        ),
    ],
)
def test_the_processes(write, fields, wanted):
    given = dict(fields)
    block = {"max_instance_count": 2} | ({"distribution": given.pop("block")} if "block" in given else {})
    assert load_elastic_job(write(elastic=block, **given)).distribution == ElasticDistribution(**wanted)


def test_node_pools(write):
    pools = [
        {"compute": "spot", "max_instance_count": 6},
        {"compute": "dedicated", "min_instance_count": 1, "max_instance_count": 2},
    ]
    job = load_elastic_job(write(compute=..., elastic={"pools": pools}, resources={"shm_size": "8g"}))
    assert job.pools == tuple(NodePool(**pool) for pool in pools)
    assert (job.resources.min_instance_count, job.resources.max_instance_count) == (1, 8)
    assert job.resources.shm_size == "8g"
    fewer = load_elastic_job(write(compute=..., elastic={"pools": pools, "max_instance_count": 3}))
    assert fewer.resources.max_instance_count == 3
    assert "compute and elastic.pools" in refused(write(elastic={"pools": pools}))


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        (
            {"distribution": {"max_restart": 3}},
            ["elastic.distribution.max_restart is no", "mean max_restarts?", "recovery"],
        ),
        ({"max_instance_cout": 3}, ["elastic.max_instance_cout is no", "mean max_instance_count?", "checkpoint,"]),
        ({"max_restarts": 3}, ["elastic.max_restarts is no", "belongs to elastic.distribution."]),
        ({"shm_size": "8g"}, ["elastic.shm_size is no", "outside the block, as resources.shm_size."]),
        ({"environment": "e"}, ["elastic.environment is no", "outside the block, as in any command job."]),
        ({"zzz": 1}, ["elastic.zzz is no field. The fields of elastic are audit, batch,"]),
        ({"rendezvous": {"timings": {"heartbeat": 1}}}, ["rendezvous.timings.heartbeat is no"]),
        ({"distribution": {"hang_timeout": 1}}, ["distribution.hang_timeout is no", "belongs to elastic.health."]),
        ({"presets": {"profile": {}}}, ["elastic.presets.profile is no", "belongs to elastic."]),
        ({"batch": {"scaling": "linear"}}, ["elastic.batch.kind", "fixed_global or fixed_per_worker"]),
        ({"batch": {"kind": "fixed_global", "logical_worker": 1}}, ["batch.logical_worker is no", "logical_workers?"]),
        ({"batch": {"kind": "fixed_per_worker"}}, ["elastic.batch.scaling is missing"]),
        (
            {"batch": {"kind": "fixed_per_worker", "scaling": "sqrt", "momentum": {"step": 3}}},
            ["elastic.batch.momentum.step is no field; did you mean steps?"],
        ),
        ({"pools": [{"compute": "a"}]}, ["elastic.pools.0.max_instance_count is missing"]),
        (
            {"checkpoint": {"every": -1, "keep": 1}},
            ["elastic.checkpoint.every=-1", "more than 0 s", "checkpoint.keep=1"],
        ),
        ({"checkpoint": {"every": "soon"}}, ["elastic.checkpoint.every='soon'", "'auto' or a duration", "'10m'"]),
        ({"delivery": "mail"}, ["elastic.delivery='mail'", "'ship' or 'environment'"]),
        ({"distribution": None}, ["elastic.distribution=null", "a block of fields"]),
        ({"distribution": [1]}, ["elastic.distribution: ", "a block of fields"]),
        ({"max_instance_count": "many"}, ["elastic.max_instance_count='many'", "integer"]),
        (
            {"min_instance_count": 5, "max_instance_count": 3},
            ["elastic.min_instance_count: 5 is above elastic.max_instance_count: 3"],
        ),
        ("many", ["elastic is a text, not a block of fields"]),
        ([1], ["elastic is a list, not a block of fields"]),
        ({"checkpoint": {"every": 1}}, ["nothing says how many nodes", SHORTEST]),
    ],
)
def test_a_wrong_block_is_refused_with_its_place(write, block, parts):
    said = refused(write(elastic=block))
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"elastic": ...}, ["no elastic: block", SHORTEST]),
        ({"type": "pipeline"}, ["type is 'pipeline'", "load_elastic_pipeline()"]),
        ({"zzz": 1}, ["zzz is no field of a command job"]),
        ({"comput": "gpu"}, ["comput is no field", "did you mean compute?"]),
        ({"resources": {"shm_sze": "8g"}}, ["resources.shm_sze is no field", "did you mean shm_size?"]),
        ({"resources": {"min_instance_count": 2}}, ["resources.min_instance_count", "as elastic.min_instance_count"]),
        ({"checkpoint": {"every": 3}}, ["checkpoint belongs in the elastic: block, as elastic.checkpoint"]),
        ({"code": "nowhere"}, ["code: ", "/jobs/nowhere"]),
        ({"environment": "file:nowhere.yml"}, ["environment: ", "/jobs/nowhere.yml"]),
        ({"environment": ...}, ["environment"]),
        ({"command": ...}, ["command"]),
        ({"limits": {"timeout": 0}}, ["limits.timeout: ", "not positive"]),
        ({"queue_settings": {"job_tier": "fast"}}, ["queue_settings.job_tier: 'fast' is none of 'spot', 'basic'"]),
        ({"identity": {"type": "x"}}, ["identity.type: 'x' is none of", "'user_identity'", "'aml_token'"]),
        (
            {"inputs": {"i": {"type": "uri_file", "mode": "x", "path": "azureml:a:1"}}},
            ["inputs.i.mode: 'x' is none of"],
        ),
        (
            {"inputs": {"n": {"type": "integer", "default": 4}}},
            ["inputs.n.type is 'integer'", "Give the value itself, as in 'n: 4'."],
        ),
        (
            {"distribution": {"type": "mpi"}},
            ["The distribution 'mpi' cannot be carried", "give elastic.distribution.framework: horovod."],
        ),
        (
            {
                "distribution": {"type": "mpi"},
                "elastic": {"max_instance_count": 2, "distribution": {"max_restarts": 7}},
            },
            ["distribution.type is 'mpi'", "give elastic.distribution.framework"],
        ),
        ({"environment_variables": {"A": None}}, ["environment_variables.A is empty"]),
        ({"environment_variables": {"A": {"b": 1}}}, ["environment_variables.A is a block"]),
        ({"environment_variables": [1]}, ["environment_variables: "]),
    ],
)
def test_a_wrong_job_is_refused_with_its_place(write, fields, parts):
    said = refused(write(**fields))
    for part in parts:
        assert part in said
    assert "{" not in said
    assert "https://" not in said


def test_a_launcher_that_cannot_be_translated_is_refused(write):
    assert "Give command: python x.py." in refused(
        write(command="accelerate launch --use_fsdp x.py"), kind=CommandError
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b\nc: d: e\n", "line 2, column 5: this is no YAML: mapping values are not allowed here."),
        ("a: [b\nc: d\n", "line 2, column 2: this is no YAML: expected ',' or ']'"),
        ("a: &x 1\nb: *y\n", "line 2, column 4: this is no YAML: found undefined alias"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2, column 11: this is no YAML: 'c' is there twice."),
        ("elastic: 1\na: 2\nelastic: 3\n", "line 3, column 1: this is no YAML: 'elastic' is there twice."),
        ("a: !!python/object:os.system 1\n", "line 1, column 4: this is no YAML: could not determine a constructor"),
        ("a: 1\nb: \x00\n", "line 2: this is no YAML: it has a character"),
        ("", "is no job"),
        ("- a\n", "is no job"),
        ("just text", "is no job"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(write, text, said):
    assert refused(write(text)).startswith(said)


def test_merged_blocks_and_anchors_are_yaml_as_ever(write):
    text = yaml.safe_dump(MINIMAL) + "tags: &t {a: b, c: d}\nproperties: {<<: *t, a: e}\n" + SHORTEST
    job = load_elastic_job(write(text))
    assert (job.tags, job.properties) == ({"a": "b", "c": "d"}, {"a": "e", "c": "d"})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere.yml", "No such file"),
        (lambda folder: folder, "Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read(project, make, said):
    path = make(project)
    assert said in refused(path)
    binary = project / "binary.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(binary)


SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    "fields",
    [
        {"zzz": 1},
        {"environment_variables": [SECRET]},
        {"environment_variables": SECRET},
        {"environment_variables": {"KEY": {"a": SECRET}}},
        {"environment_variables": {"KEY": [SECRET]}},
        {"environment_variables": {"KEY": SECRET}, "limits": {"timeout": 0}},
        {"environment_variables": {"KEY": SECRET}, "limits": {"timeout": SECRET}},
        {"environment_variables": {"KEY": SECRET}, "queue_settings": {"job_tier": SECRET}},
        {"environment_variables": {"KEY": SECRET}, "elastic": {"min_instance_count": 9, "max_instance_count": 2}},
        {"environment_variables": {"KEY": SECRET}, "elastic": {"zzz": 1}},
        {"environment_variables": {"KEY": SECRET}, "distribution": {"type": "mpi"}},
        {"elastic": {"delivery": f"DefaultEndpointsProtocol=https;AccountKey={SECRET}"}},
    ],
)
def test_no_secret_is_in_an_error_or_its_traceback(write, fields):
    given = {"environment_variables": {"KEY": SECRET}, **fields}
    with pytest.raises(SubmitError) as caught:
        load_elastic_job(write(**given))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_no_secret_is_shown_where_the_yaml_is_broken(write):
    path = write(f"environment_variables: {{KEY: {SECRET}\nelastic: 1\n")
    with pytest.raises(SubmitError) as caught:
        load_elastic_job(path)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_the_block_has_what_a_command_job_cannot_say():
    fields = ElasticCommandJob.model_fields.keys() - fields_of_command() - {"type", "resources"}
    counts = {"min_instance_count", "max_instance_count", "placement"}
    assert block_model().model_fields.keys() == fields | counts | {"pools", "distribution"}
