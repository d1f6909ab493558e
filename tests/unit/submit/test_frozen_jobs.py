"""A job is frozen, with all that it holds; each refusal names the copy that would have the change."""

import copy
import inspect
import pickle

import pytest
from azure.ai.ml.entities import Job

from azureml_elastic.config import ElasticResources
from azureml_elastic.submit import ElasticCommandJob

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda job: job.model_copy(),
    "deep model_copy": lambda job: job.model_copy(deep=True),
    "changed model_copy": lambda job: job.model_copy(update={"name": None}),
    "with_options": lambda job: job.with_options(),
    "pickle": lambda job: pickle.loads(pickle.dumps(job)),
    "validation": lambda job: ElasticCommandJob.model_validate(job.model_dump()),
}


def make(**fields):
    return ElasticCommandJob(
        **{
            "command": "python train.py",
            "environment": {"image": "i"},
            "compute": "cpu",
            "inputs": {"lr": 0.1, "data": {"type": "uri_folder", "path": "azureml:data:1"}},
            "environment_variables": {"TOKEN": "secret"},
            "tags": {"a": "1"},
            "services": {"lab": {"type": "jupyter_lab"}},
            "resources": {"max_instance_count": 2, "properties": {"p": {"q": 1}}},
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("statement", "change"),
    [
        ("job.compute = 'gpu'", 'compute="gpu"'),
        ("job.name = None", "name=None"),
        ("job.tags = {'b': 2}", 'tags={"b": 2}'),
        ("job.resources = ElasticResources(max_instance_count=3)", "resources=..."),
        ("job.resources.max_instance_count = 8", 'resources={"max_instance_count": 8}'),
        ("job.resources.properties['p'] = 1", 'resources={"properties": ...}'),
        ("job.resources.properties['p']['q'] = 1", 'resources={"properties": ...}'),
        ("job.rendezvous.timings.join_timeout = 3", 'rendezvous={"timings": {"join_timeout": 3}}'),
        ("job.tags['c'] = 'd'", 'tags={"c": "d"}'),
        ("job.tags |= {'c': 'd'}", 'tags={"c": "d"}'),
        ("job.tags.update(c='d')", 'tags={"c": "d"}'),
        ("job.tags.setdefault('c', 'd')", 'tags={"c": "d"}'),
        ("job.inputs['lr'] = .5", 'inputs={"lr": 0.5}'),
        ("job.inputs.lr = .5", 'inputs={"lr": 0.5}'),
        ("job.inputs['data']['path'] = 'x'", 'inputs={"data": ...}'),
        ("job.services['lab']['nodes'] = 'all'", 'services={"lab": ...}'),
        ("job.environment['image'] = 'j'", 'environment={"image": "j"}'),
        ("job.environment_variables['TOKEN'] = 'other'", 'environment_variables={"TOKEN": ...}'),
        ("job.set_resources(instance_count=2)", 'resources={"max_instance_count": 4}'),
        ("job.set_limits(timeout=60)", 'timeout="2h"'),
        ("job.set_queue_settings(job_tier='Spot')", 'job_tier="Spot", priority="high"'),
    ],
)
def test_a_change_is_refused_with_the_copy_that_would_have_it(statement, change):
    job = make()
    with pytest.raises((AttributeError, TypeError)) as refusal:
        exec(statement, {"job": job, "ElasticResources": ElasticResources})
    assert f"job = job.with_options({change})" in str(refusal.value)
    assert "other" not in str(refusal.value)
    assert job == make()


@pytest.mark.parametrize(
    "statement", ["del job.tags['a']", "job.tags.pop('a')", "job.tags.popitem()", "job.tags.clear()", "del job.tags"]
)
def test_what_is_removed_is_replaced_in_a_copy(statement):
    with pytest.raises((AttributeError, TypeError)) as refusal:
        exec(statement, {"job": make()})
    assert 'job.model_copy(update={"tags": ...})' in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("limits", "give timeout=..."),
        ("instance_count", "resources=ElasticResources(min_instance_count=..., max_instance_count=...)"),
        ("comput", "did you mean compute?"),
        ("status", "What create_or_update(job) returns has"),
    ],
)
def test_a_name_of_a_command_job_says_where_it_is(name, said):
    for act in (lambda: getattr(make(), name), lambda: setattr(make(), name, 1)):
        with pytest.raises(AttributeError) as refusal:
            act()
        assert said in str(refusal.value)
    assert not hasattr(make(), name)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_equal_and_as_frozen(name):
    job = make()
    made = COPIES[name](job)
    assert made == job
    for change in (lambda: made.inputs.update(lr=1), lambda: made.inputs["data"].update(path="x")):
        with pytest.raises(TypeError, match="with_options"):
            change()


def test_a_job_keeps_nothing_of_the_dictionaries_that_it_was_given():
    data, tags = {"type": "uri_folder", "path": "azureml:data:1"}, {"a": "1"}
    job = make(inputs={"data": data}, tags=tags)
    data["path"], tags["a"] = "azureml:data:2", "2"
    assert (job.inputs["data"]["path"], job.tags["a"]) == ("azureml:data:1", "1")


def test_a_copy_of_a_mapping_can_be_changed():
    job = make()
    for made in (dict(job.tags), job.tags.copy(), copy.deepcopy(job.tags), job.tags | {}):
        made["a"] = "2"
    for made in (copy.deepcopy(job.inputs), job.model_dump()["inputs"]):
        made["data"]["path"] = "x"
    assert job == make()


def test_values_are_taken_as_command_takes_them():
    given = {"a": 1, "b": True, "c": None, "d": 0.5}
    text = {"a": "1", "b": "True", "d": "0.5"}
    job = make(tags=given, properties=given, environment_variables=given, job_tier="spot", priority="High")
    assert (job.tags, job.properties, job.environment_variables) == (text, text, text)
    assert (job.job_tier, job.priority) == ("Spot", "high")
    assert job.with_options(tags={"a": None}).tags == {"b": "True", "d": "0.5"}


def test_a_job_shows_what_is_its_own():
    job = make()
    assert isinstance(job, Job)
    shown = {name for name in dir(job) if not name.startswith("_")}
    assert {"command", "resources", "plan", "with_options", "sweep", "model_copy", "from_command"} < shown
    assert not {"model_fields", "model_config", "parse_obj", "json", "dict", "set_resources"} & shown
    defaults = [repr(field.default) for field in inspect.signature(ElasticCommandJob).parameters.values()]
    assert max(map(len, defaults)) < 40
