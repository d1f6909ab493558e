"""What the YAML of a job looks like, and what it cannot express; what it sends is in ``test_bodies.py``."""

import re

import pytest
import yaml
from azure.ai.ml import Input, Output, load_job
from azure.ai.ml.entities import (
    BuildContext,
    Environment,
    JobService,
    ManagedIdentityConfiguration,
)

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.yaml.entity_document import PathFormat
from azureml_elastic.submit.yaml.standard_yaml import standard_yaml
from tests.unit.submit.jobs import small_job

PLACEMENTS = ["fan_out", "service", "gang"]
URI = "azureml://datastores/workspaceblobstore/paths/x"


def make(placement="gang", **fields):
    resources = {name: fields.pop(name) for name in ElasticResources.model_fields if name in fields}
    names = {"delivery": "environment", "display_name": "shown", "experiment_name": "tried"}
    return small_job(placement, resources, **{**names, **fields})


def test_names_that_azure_ai_ml_chooses_are_left_to_it():
    text = standard_yaml(make("fan_out", display_name=None, experiment_name=None))
    assert not {"name", "display_name", "experiment_name"} & yaml.safe_load(text).keys()


def test_a_shown_job_has_whole_paths_and_needs_no_folder(arrived, folder, tmp_path, monkeypatch):
    job = make("fan_out", delivery="ship", inputs={"d": Input(type="uri_folder", path="src")})
    text = standard_yaml(job)
    document = yaml.safe_load(text)
    assert document["jobs"]["node_0"]["component"]["code"] == str(folder / "src")
    assert document["inputs"]["d"]["path"] == str(folder / "src")
    direct = arrived(job)
    (tmp_path / "job.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert arrived(load_job("job.yml")) == direct


def test_equal_parts_of_a_pipeline_are_written_once(folder):
    text = standard_yaml(make("fan_out", max_instance_count=64), PathFormat(folder))
    assert len(yaml.safe_load(text)["jobs"]) == 64
    assert text.count("AZUREML_ELASTIC_PLAN") == 1
    assert len(text) < 20_000


def test_paths_that_are_to_stay_absolute(folder):
    inputs = {name: Input(type="uri_folder", path=name) for name in ("data", "src")}
    document = yaml.safe_load(
        standard_yaml(make(inputs=inputs), PathFormat(folder / "compiled", frozenset({str(folder / "data")})))
    )
    assert document["inputs"]["data"]["path"] == str(folder / "data")
    assert document["inputs"]["src"]["path"] == "../src"


def test_paths_hold_where_a_folder_is_a_link(arrived, folder, tmp_path, monkeypatch):
    real = tmp_path / "far" / "away" / "compiled"
    real.mkdir(parents=True)
    (folder / "compiled").symlink_to(real)
    (folder / "linked").symlink_to(folder / "src")
    job = make(inputs={"d": Input(type="uri_folder", path="linked")})
    text = standard_yaml(job, PathFormat(folder / "compiled"))
    assert yaml.safe_load(text)["inputs"]["d"]["path"] == "../../../a project/linked"
    (folder / "compiled" / "job.yml").write_text(text)
    direct = arrived(job)
    assert len(direct["uploads"]) == 1
    assert arrived(load_job(folder / "compiled" / "job.yml")) == direct


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"inputs": {"i": Input(type="uri_folder", path=URI, description="d")}}, ["input 'i' has description"]),
        ({"inputs": {"i": Input(type="uri_folder", path=URI, mode="rw_mount")}}, ["inputs.i.mode", "'rw_mount'"]),
        ({"outputs": {"o": Output(type="uri_folder", description="d")}}, ["output 'o' has description"]),
        ({"outputs": {"o": Output(type="uri_folder", early_available=True)}}, ["output 'o' has early_available"]),
        ({"identity": ManagedIdentityConfiguration(resource_id="r")}, ["identity has resource_id"]),
        ({"identity": ManagedIdentityConfiguration(principal_id="p")}, ["identity has principal_id"]),
        ({"services": {"s": JobService()}}, ["service 's' has type=''"]),
        ({"services": {"s": JobService(type="ssh", endpoint="e")}}, ["services.s.endpoint"]),
        ({"environment": Environment(image="i", name="mine", version="3")}, ["'mine'", "azureml:mine:3"]),
        ({"environment": Environment(image="i", os_type="Linux")}, ["environment.os_type"]),
        ({"environment": Environment(image="i", properties={"a": "1"})}, ["environment has properties"]),
        ({"environment": Environment(image="i", inference_config={"a": 1})}, ["environment has inference_config"]),
    ],
)
def test_what_yaml_has_no_field_for_is_refused_by_name(placement, fields, parts):
    with pytest.raises(SubmitError) as caught:
        standard_yaml(make(placement, **fields))
    for part in parts:
        assert part in str(caught.value)


def test_an_environment_whose_name_changes_at_each_reading_is_refused_for_many_nodes():
    environment = Environment(build=BuildContext(path="https://github.com/x/y#main:d"))
    with pytest.raises(SubmitError, match=re.escape("https://github.com/x/y#main:d")):
        standard_yaml(make("fan_out", environment=environment))


def test_variables_are_not_shown_where_the_yaml_is_refused():
    secret = "hunter2-hunter2"
    with pytest.raises(SubmitError) as caught:
        standard_yaml(
            make(
                environment_variables={"KEY": secret},
                inputs={"i": Input(type="uri_folder", path=URI, mode="rw_mount"), "j": secret},
            )
        )
    assert secret not in str(caught.value)
