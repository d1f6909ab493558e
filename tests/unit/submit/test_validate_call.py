"""``ml_client.jobs.validate(job)`` finds what submission would refuse."""

from unittest.mock import Mock

import pytest
from azure.ai.ml import command, dsl
from azure.ai.ml.operations import JobOperations

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import CommandError
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
    sdk_hooks.register(ElasticCommandJob, "x.pyz")
    assert JobOperations.validate is before
