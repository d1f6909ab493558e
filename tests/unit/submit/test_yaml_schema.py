"""The JSON schema of job files: it says what the models say, and the samples keep to it."""

import json

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from azureml_elastic.config import FixedPerWorkerBatch
from azureml_elastic.submit import load_elastic_job
from azureml_elastic.submit.yaml.elastic_block import block_model, described, job_schema, models_in, schema_text
from tests.support.paths import ROOT

PUBLISHED = ROOT / "docs" / "elastic-job.schema.json"
SAMPLE = ROOT / "samples" / "yaml" / "job.yml"
SHORTEST = {"command": "python train.py", "environment": "e", "elastic": {"max_instance_count": 2}}


@pytest.fixture
def faults():
    """Return the places that the schema finds wrong in a job."""
    checker = jsonschema.Draft7Validator(job_schema())
    return lambda job: [".".join(map(str, fault.absolute_path)) for fault in checker.iter_errors(job)]


def test_the_published_schema_is_that_of_the_models():
    assert PUBLISHED.read_text(encoding="utf-8") == schema_text(), (
        f"{PUBLISHED} is older than the models. Write it anew: azureml-elastic schema > docs/elastic-job.schema.json"
    )


def test_it_is_a_schema():
    jsonschema.Draft7Validator.check_schema(json.loads(schema_text()))


def all_models(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        for one in models_in(field.annotation):
            found |= all_models(one)
    return found


@pytest.mark.parametrize("model", sorted(all_models(block_model()) - {block_model()}, key=lambda one: one.__name__))
def test_every_field_is_described(model):
    constant = {"type", "kind"}
    assert described(model).keys() >= model.model_fields.keys() - constant
    schema = job_schema()["definitions"][model.__name__]
    assert schema["description"]
    assert all(field.get("description") for name, field in schema["properties"].items() if name not in constant)


def test_every_field_of_the_block_is_described():
    block = job_schema()["properties"]["elastic"]["properties"]
    assert block.keys() == block_model().model_fields.keys()
    assert [name for name, field in block.items() if not field.get("description")] == []


def test_descriptions_are_plain_sentences():
    text = described(FixedPerWorkerBatch)["momentum"]
    assert text.startswith('compensation of momentum where the factor rises: a Ramp; "rescale" divides')
    assert not {"`", "\n", "None"} & {part for part in ("`", "\n", "None") if part in schema_text().replace("\n", "")}


def test_the_sample_keeps_to_the_schema_and_compiles(faults):
    assert faults(yaml.safe_load(SAMPLE.read_text())) == []
    entity = load_elastic_job(SAMPLE).compile()
    assert sorted(entity.jobs) == [*("dedicated_cluster_0",), *(f"spot_cluster_{number}" for number in range(5))]


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"distribution": {"max_restart": 3}}, "elastic.distribution"),
        ({"checkpoint": {"keep": 1}}, "elastic.checkpoint.keep"),
        ({"checkpoint": {"every": []}}, "elastic.checkpoint.every"),
        ({"batch": {"logical_workers": 12}}, "elastic.batch"),
        ({"pools": [{"compute": "a"}]}, "elastic.pools"),
        ({"delivery": "mail"}, "elastic.delivery"),
        ({"zzz": 1}, "elastic"),
    ],
)
def test_what_the_loader_refuses_is_marked(faults, block, place):
    assert faults({**SHORTEST, "elastic": block}) == [place]


@pytest.mark.parametrize(
    "block",
    [
        {"max_instance_count": 3},
        {"checkpoint": {"every": "auto", "every_steps": None}},
        {"health": {"hang_timeout": "5m"}, "distribution": {"stop_timeout": 60.5}},
        {"batch": {"kind": "fixed_per_worker", "scaling": "linear", "momentum": {"steps": 3}}},
        {"pools": [{"compute": "a", "max_instance_count": 1}]},
        {"replacement": None},
    ],
)
def test_what_the_loader_takes_is_not(faults, block):
    assert faults({**SHORTEST, "services": {"lab": {"type": "jupyter_lab"}}, "elastic": block}) == []


@pytest.mark.parametrize("missing", ["command", "environment", "elastic"])
def test_what_every_job_has_must_be_there(faults, missing):
    assert faults({name: value for name, value in SHORTEST.items() if name != missing}) == [""]
