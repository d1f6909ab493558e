"""Changed copies of a job: validated like a new one, with mappings merged or replaced."""

import copy

import pytest
from pydantic import ValidationError

from azureml_elastic.config import (
    CheckpointPolicy,
    ElasticResources,
    FixedGlobalBatch,
    FixedPerWorkerBatch,
    NodePool,
    RendezvousTimings,
)
from tests.unit.submit.jobs import small_job


def job(**fields):
    resources = ElasticResources(min_instance_count=2, max_instance_count=4, shm_size="8g")
    return small_job(**{"resources": resources, "environment_variables": {"A": "1", "B": "2"}, **fields})


def test_mappings_are_merged():
    made = job(tags={"t": "1"}, inputs={"lr": 0.1, "seed": 1}, outputs={"model": None})
    made = made.with_options(environment_variables={"B": "3", "C": "4"}, tags={"u": "2"}, inputs={"lr": 0.2})
    assert made.environment_variables == {"A": "1", "B": "3", "C": "4"}
    assert made.tags == {"t": "1", "u": "2"}
    assert made.inputs == {"lr": 0.2, "seed": 1}
    assert made.outputs == {"model": None}


def test_the_fields_of_a_model_are_merged():
    made = job(checkpoint=CheckpointPolicy(every_steps=5)).with_options(
        resources={"max_instance_count": 8}, checkpoint={"keep": 3}
    )
    assert made.resources == ElasticResources(min_instance_count=2, max_instance_count=8, shm_size="8g")
    assert made.checkpoint == CheckpointPolicy(every_steps=5, keep=3)
    made = made.with_options(rendezvous={"timings": {"join_timeout": "9s"}}).with_options(
        distribution={"max_restarts": 1}, rendezvous={"timings": {"rejoin_timeout": "8s"}}
    )
    assert made.rendezvous.timings == RendezvousTimings(join_timeout=9, rejoin_timeout=8)
    assert made.distribution.max_restarts == 1


def test_a_model_replaces_another():
    made = job(checkpoint=CheckpointPolicy(every_steps=5)).with_options(
        checkpoint=CheckpointPolicy(keep=3), batch=FixedPerWorkerBatch(scaling="linear")
    )
    assert made.checkpoint == CheckpointPolicy(keep=3)
    assert made.batch == FixedPerWorkerBatch(scaling="linear")
    assert made.with_options(batch={"max_scale": 4}).batch == FixedPerWorkerBatch(scaling="linear", max_scale=4)
    assert made.with_options(batch={"kind": "fixed_global"}).batch == FixedGlobalBatch()
    assert made.with_options(replacement=None).with_options(replacement={"budget": 5.0}).replacement.budget == 5.0


def test_the_given_job_is_not_changed():
    given = job()
    made = given.with_options(command="python other.py", environment_variables={"A": "0"})
    assert (made.command, given.command) == ("python other.py", "python train.py")
    assert given.environment_variables == {"A": "1", "B": "2"}
    assert given.with_options() == given


def test_counts_that_pools_gave_follow_the_pools():
    given = job(compute=[NodePool("spot", max_instance_count=4)], resources=None)
    made = given.with_options(compute=[NodePool("spot", max_instance_count=6)])
    assert made.resources.max_instance_count == 6
    kept = job(compute=[NodePool("spot", max_instance_count=6)]).with_options(
        compute=[NodePool("spot", max_instance_count=8)]
    )
    assert kept.resources.max_instance_count == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"comand": "python train.py"}, "comand"),
        ({"resources": {"max_instance_counts": 1}}, "max_instance_counts"),
        ({"command": None}, "command"),
        ({"environment_variables": ["A=1"]}, "environment_variables"),
        ({"job_tier": "cheap"}, "job_tier"),
        ({"instance_count": 4}, "instance_count"),
    ],
)
def test_changes_are_validated(changes, named):
    with pytest.raises(ValidationError, match=named):
        job().with_options(**changes)
    with pytest.raises(ValidationError, match=named):
        job().model_copy(update=changes)


def test_merged_fields_are_validated_together():
    with pytest.raises(ValidationError, match="min_instance_count"):
        job().with_options(resources={"max_instance_count": 1})


def test_model_copy_replaces_whole_values():
    given = job()
    made = given.model_copy(update={"environment_variables": {"C": "3"}, "timeout": 60})
    assert made.environment_variables == {"C": "3"}
    assert made.timeout.total_seconds() == 60
    assert made.model_fields_set == given.model_fields_set | {"timeout"}
    assert given.model_copy() == given == copy.deepcopy(given)
