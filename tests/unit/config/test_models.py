"""The models: frozen, closed, with messages that name the field, the value and the limit."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import azureml_elastic
from azureml_elastic.config import (
    CheckpointPolicy,
    ElasticDistribution,
    ElasticResources,
    FixedGlobalBatch,
    HealthPolicy,
    NodePool,
    Plan,
    PreemptionPolicy,
    Profile,
    RendezvousTimings,
    TableRendezvous,
)
from azureml_elastic.errors import PlanError


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ElasticResources(min_instance_count=4, max_instance_count=3), "min_instance_count=4"),
        (lambda: ElasticResources(min_instance_count=0, max_instance_count=3), "min_instance_count=0 is below"),
        (lambda: ElasticResources(max_instance_count=-1), "max_instance_count=-1 is below"),
        (ElasticResources, "max_instance_count"),
        (lambda: ElasticResources(max_instance_count=2, instances=3), "instances"),
        (lambda: ElasticResources(max_instance_count=2, placement="spread"), "placement"),
        (lambda: ElasticDistribution(process_count_per_instance=0), "process_count_per_instance=0"),
        (
            lambda: Plan(
                resources=ElasticResources(max_instance_count=1),
                distribution=ElasticDistribution(framework="dask", process_count_per_instance=4),
                rendezvous=TableRendezvous(port_range=(29400, 29438)),
            ),
            "a node needs 10 for each of its workers, 40 in all",
        ),
        (lambda: ElasticDistribution(process_count_per_instance="many"), "process_count_per_instance"),
        (lambda: ElasticDistribution(max_restarts=-1), "max_restarts"),
        (lambda: CheckpointPolicy(every=0), "not positive"),
        (lambda: CheckpointPolicy(keep=1), "keep"),
        (lambda: CheckpointPolicy(every=timedelta(seconds=-1)), "-1 s is not positive"),
        (lambda: RendezvousTimings(heartbeat_interval=2, heartbeat_timeout=3), "heartbeat_timeout=3 s"),
        (lambda: TableRendezvous(table="no-dashes"), "table"),
        (lambda: PreemptionPolicy(grace=-1), "-1 s is negative"),
        (lambda: HealthPolicy(quarantine_strikes=0), "quarantine_strikes"),
        (lambda: PreemptionPolicy(marker=""), "marker"),
        (lambda: PreemptionPolicy(scheduled_events="https://169.254.169.254/metadata"), "http://host[:port]/path"),
        (lambda: PreemptionPolicy(scheduled_events="http://"), "'http://'"),
        (lambda: PreemptionPolicy(scheduled_events="http://x:99999/"), "http://x:99999/"),
        (lambda: PreemptionPolicy(scheduled_events="http://x/metadata?api-version=1"), "api-version=1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name_and_value(make, said):
    with pytest.raises(ValidationError) as refusal:
        make()
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "name", "value", "said"),
    [
        (ElasticResources(max_instance_count=2), "max_instance_count", 3, 'resources={"max_instance_count": 3}'),
        (ElasticResources(max_instance_count=2), "properties", {"a": 1}, 'resources={"properties": ...}'),
        (RendezvousTimings(), "join_timeout", "9s", 'rendezvous={"timings": {"join_timeout": "9s"}}'),
        (FixedGlobalBatch(), "logical_workers", None, 'batch={"logical_workers": None}'),
        (NodePool("spot", max_instance_count=2), "max_instance_count", 3, "make a new NodePool"),
        (CheckpointPolicy(), "evry", 3, "evry is no field of CheckpointPolicy; did you mean every?"),
    ],
)
def test_a_model_is_frozen_and_says_how_a_job_is_changed(model, name, value, said):
    with pytest.raises(AttributeError) as refusal:
        setattr(model, name, value)
    assert said in str(refusal.value)
    with pytest.raises(AttributeError):
        delattr(model, name)


def test_the_representation_of_a_model_shows_what_it_was_given():
    assert repr(CheckpointPolicy()) == "CheckpointPolicy()"
    assert repr(ElasticResources(max_instance_count=2)) == "ElasticResources(max_instance_count=2)"
    assert repr(TableRendezvous(port_range=[29400, 29500])) == "TableRendezvous(port_range=(29400, 29500))"


@pytest.mark.parametrize(("maximum", "placement"), [(1, "gang"), (2, "fan_out")])
def test_the_default_placement(maximum, placement):
    assert ElasticResources(max_instance_count=maximum).effective_placement == placement
    assert ElasticResources(max_instance_count=maximum, placement="service").effective_placement == "service"


plans = st.builds(
    Plan,
    resources=st.builds(ElasticResources, min_instance_count=st.just(1), max_instance_count=st.integers(1, 99)),
    distribution=st.builds(
        ElasticDistribution,
        process_count_per_instance=st.one_of(st.just("auto"), st.integers(1, 8)),
        max_restarts=st.integers(0, 9),
        handover_timeout=st.timedeltas(timedelta(milliseconds=1), timedelta(days=1)),
    ),
    checkpoint=st.builds(
        CheckpointPolicy,
        path=st.one_of(st.none(), st.text()),
        every=st.one_of(st.none(), st.timedeltas(timedelta(seconds=1), timedelta(days=1))),
        every_steps=st.one_of(st.none(), st.integers(1)),
    ),
    name=st.one_of(st.none(), st.text()),
    audit=st.booleans(),
    profile=st.one_of(
        st.none(), st.builds(Profile, first_step=st.integers(1, 99), ranks=st.sampled_from(["all", (0, 3)]))
    ),
)


@given(plan=plans)
def test_a_plan_survives_the_crossing(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[]", "list"),
        ("{}", "version None"),
        ('{"version": 2, "anything": 1}', "version 2"),
        ('{"version": 1}', "resources"),
        ('{"version": 1, "resources": {"max_instance_count": 2}, "colour": "red"}', "colour"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(text, said):
    with pytest.raises(PlanError, match=said):
        Plan.from_json(text)


_LOADERS = {"load_elastic_job", "load_elastic_pipeline", "load_elastic_sweep"}
"""Names that need azure-ai-ml."""


def test_every_public_name_is_there():
    assert azureml_elastic.__all__ == sorted(azureml_elastic.__all__)
    for name in set(azureml_elastic.__all__) - {"ElasticCommandJob", "train", *_LOADERS}:
        assert getattr(azureml_elastic, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = azureml_elastic.nothing


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("10m", 600),
        ("5min", 300),
        ("1h 30m", 5400),
        ("2d", 172800),
        ("PT2H", 7200),
    ],
)
def test_durations_are_written_as_people_write_them(text, seconds):
    policy = CheckpointPolicy(every=text)
    assert policy.every == timedelta(seconds=seconds)
    assert CheckpointPolicy.model_validate_json(policy.model_dump_json()) == policy


@pytest.mark.parametrize("text", ["", "10x", "m", "10m5", "1 2", "-5m", "1e9999d", f"{'9' * 400}d", "infs"])
def test_other_texts_are_no_durations(text):
    with pytest.raises(ValidationError, match="duration"):
        CheckpointPolicy(every=text)
