"""Node pools: what is asked of which compute at once, and what is refused."""

import pytest

from azureml_elastic.config import ElasticResources, NodePool, ReplacementPolicy
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob
from tests.unit.submit.jobs import small_job

SPOT = NodePool("gpu", max_instance_count=3)
DEDICATED = NodePool("other", min_instance_count=1, max_instance_count=2)


def make(*pools, **fields):
    return small_job(**{"compute": pools, "resources": None, **fields})


def test_each_node_has_the_compute_of_its_pool(client, sent):
    job = make(SPOT, DEDICATED, resources=ElasticResources(max_instance_count=4, shm_size="8g"))
    client.jobs.create_or_update(job)
    (body,) = sent()
    jobs = body["properties"]["jobs"]
    assert {name: node["computeId"].rpartition("/")[2] for name, node in jobs.items()} == {
        "gpu_0": "gpu",
        "gpu_1": "gpu",
        "gpu_2": "gpu",
        "other_0": "other",
    }
    assert all(node["resources"] == {"instance_count": 1, "shm_size": "8g"} for node in jobs.values())
    assert {node["componentId"] for node in jobs.values()} == {
        "<workspace>/components/azureml_anonymous/versions/<uuid>"
    }


def test_serverless_pools_have_their_own_size_and_tier(client, sent):
    spot = NodePool("serverless", max_instance_count=1, instance_type="Standard_NC6s_v3", job_tier="Spot")
    sure = NodePool("serverless", max_instance_count=1, instance_type="Standard_NC6s_v3")
    client.jobs.create_or_update(make(spot, sure))
    (body,) = sent()
    (name, node), (other, sure_node) = body["properties"]["jobs"].items()
    assert (name, other) == ("serverless_standard_nc6s_v3_spot_0", "serverless_standard_nc6s_v3_0")
    assert node["resources"] == sure_node["resources"] == {"instance_count": 1, "instance_type": "Standard_NC6s_v3"}
    assert node["queue_settings"] == {"job_tier": "Spot"}
    assert "queue_settings" not in sure_node
    assert node["computeId"] == sure_node["computeId"] == body["properties"]["computeId"]


def test_counts_default_to_those_of_the_pools():
    job = make(SPOT, DEDICATED)
    assert (job.resources.min_instance_count, job.resources.max_instance_count) == (1, 5)
    assert job.plan.pools == (SPOT, DEDICATED)
    assert make({"compute": "gpu", "max_instance_count": 1}).resources.effective_placement == "fan_out"
    assert make(SPOT, resources=ElasticResources(max_instance_count=1)).resources.effective_placement == "fan_out"


@pytest.mark.parametrize(
    ("pools", "fields", "said"),
    [
        ((SPOT, SPOT), {}, "'gpu' is there 2 times"),
        ((SPOT,), {"resources": ElasticResources(max_instance_count=4)}, "3 nodes at most, below max_instance_count=4"),
        (
            (NodePool("gpu", min_instance_count=3, max_instance_count=3),),
            {"resources": ElasticResources(max_instance_count=2)},
            "min_instance_count add up to 3 nodes",
        ),
        ((SPOT,), {"resources": ElasticResources(max_instance_count=3, placement="gang")}, "placement='gang'"),
        ((SPOT,), {"job_tier": "Spot"}, "job_tier='Spot' cannot be combined with node pools"),
        (
            (SPOT,),
            {"resources": ElasticResources(max_instance_count=3, instance_type="S")},
            "resources.instance_type='S'",
        ),
        ((SPOT,), {"replacement": ReplacementPolicy(budget=5)}, "'gpu' has none"),
        ((), {"compute": "gpu", "replacement": ReplacementPolicy(budget=5)}, "needs a price"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(pools, fields, said):
    if "compute" in fields:
        fields = {"resources": ElasticResources(max_instance_count=2), **fields}
    with pytest.raises(SubmitError) as refusal:
        make(*pools, **fields).compile()
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"compute": []}, "compute=[] has no pool"),
        ({"compute": [{"compute": "gpu"}]}, "max_instance_count"),
        ({"compute": "gpu"}, "resources is missing; give the number of nodes"),
        ({"compute": [{"compute": "gpu", "max_instance_count": 2, "job_tier": "Spot"}]}, "'gpu' is a cluster"),
    ],
)
def test_wrong_pools_are_refused_by_name_and_nothing_of_the_variables_is_shown(fields, said):
    with pytest.raises(ValueError, match="validation error") as refusal:
        ElasticCommandJob(command="python train.py", environment="e", environment_variables={"KEY": "s3cret"}, **fields)
    assert said in str(refusal.value)
    assert "s3cret" not in str(refusal.value)


def test_a_job_with_pools_shows_them():
    text = str(make(NodePool("gpu", max_instance_count=3, price_per_hour=0.9), DEDICATED))
    assert "gpu: 0 to 3 at 0.9 USD an hour; other: 1 to 2" in text
