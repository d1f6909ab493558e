"""``ml_client.jobs.validate(job)`` finds what submission would refuse."""

from unittest.mock import Mock

import pytest
from azure.ai.ml import command
from azure.ai.ml.operations import JobOperations

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


def test_other_jobs_are_validated_as_before(folder):
    assert validate(command(command="python train.py", environment="e:1", compute="gpu")).passed


def test_registering_again_changes_nothing():
    before = JobOperations.validate
    sdk_hooks.register(ElasticCommandJob, "x.pyz")
    assert JobOperations.validate is before
