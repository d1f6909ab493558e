"""What the presets put into the documents that reach Azure ML, for each placement."""

import pytest
from azure.ai.ml import Input

from azureml_elastic import Presets, Profile
from azureml_elastic.config import ElasticResources, NodePool, Plan
from tests.unit.submit.jobs import UNCACHED, small_job

PLACEMENTS = ["fan_out", "service", "gang"]
URI = "azureml://datastores/workspaceblobstore/paths/x"
RDMA = "Standard_ND96asr_v4"
INFINIBAND = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_PCI_RELAXED_ORDERING": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_DEBUG": "WARN",
}
ETHERNET = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}


@pytest.fixture
def send(client, sent, components):
    """Submit a job and return the job's document, the variables of each node, and the component's inputs."""

    def submit(placement="gang", resources=None, **fields):
        fields = {"code": None, "command": "python -m x", "delivery": "environment", **fields}
        client.jobs.create_or_update(small_job(placement, resources, **fields))
        (body,) = sent()
        properties = body["properties"]
        if placement != "fan_out":
            return properties, [properties["environmentVariables"]], properties["inputs"]
        (component,) = components()
        return (
            properties,
            [node["environment_variables"] for node in properties["jobs"].values()],
            component.get("inputs"),
        )

    return submit


def without_plan(variables):
    return {name: value for name, value in variables.items() if name != "AZUREML_ELASTIC_PLAN"}


OWN = {"NCCL_DEBUG": "INFO", "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL": "60000", "A": "1"}
FIRST = Profile(first_step=100, ranks=(0, 1))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"presets": Presets(network="infiniband")}, UNCACHED | INFINIBAND),
        ({"presets": Presets(network=None, mount=None), "resources": {"instance_type": RDMA}}, {}),
        ({"presets": Presets(network="infiniband"), "environment_variables": OWN}, UNCACHED | INFINIBAND | OWN),
        ({"profile": FIRST}, UNCACHED),
    ],
    ids=["given", "switched off", "the job's own go before them", "a profile has none"],
)
def test_the_variables_are_on_every_node(send, placement, fields, wanted):
    _, nodes, _ = send(placement, **fields)
    assert len(nodes) == (2 if placement == "fan_out" else 1)
    for variables in nodes:
        assert without_plan(variables) == wanted
        assert Plan.from_json(variables["AZUREML_ELASTIC_PLAN"]).profile == fields.get("profile")


@pytest.mark.parametrize(
    ("mount", "wanted"),
    [
        (
            "prefetched",
            {"DATASET_MOUNT_READ_BUFFER_BLOCK_COUNT": "80", "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "False"},
        ),
        ("cached", {"DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "True", "DATASET_MOUNT_CACHE_SIZE": "-10737418240"}),
    ],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_ways_to_mount(send, placement, mount, wanted):
    for variables in send(placement, presets=Presets(mount=mount))[1]:
        assert wanted.items() <= variables.items()
        assert variables["DATASET_MOUNT_ATTRIBUTE_CACHE_TTL"] == "1"


@pytest.mark.parametrize(
    ("placement", "compute", "size", "wanted"),
    [
        *((placement, "gpu", RDMA, INFINIBAND) for placement in PLACEMENTS),
        *((placement, "gpu", "Standard_NC6s_v3", {}) for placement in PLACEMENTS),
        *((placement, "gpu", None, {}) for placement in PLACEMENTS),
        ("gang", None, RDMA, INFINIBAND),
        ("service", None, RDMA, INFINIBAND),
        ("fan_out", None, RDMA, ETHERNET),
        ("fan_out", None, "Standard_NC6s_v3", {}),
    ],
)
def test_the_network_follows_from_the_nodes(send, placement, compute, size, wanted):
    for variables in send(placement, {"instance_type": size} if size else {}, compute=compute)[1]:
        assert without_plan(variables) == UNCACHED | wanted


@pytest.mark.parametrize(
    ("pools", "wanted"),
    [
        ([NodePool("gpu", max_instance_count=2)], {}),
        ([NodePool("gpu", max_instance_count=2), NodePool("other", max_instance_count=2)], ETHERNET),
        ([NodePool("serverless", max_instance_count=2, instance_type="Standard_NC6s_v3")], {}),
        ([NodePool("serverless", max_instance_count=2, instance_type=RDMA)], ETHERNET),
    ],
)
def test_nodes_of_several_computes_have_no_infiniband_in_common(send, pools, wanted):
    for variables in send("fan_out", compute=pools)[1]:
        assert without_plan(variables) == UNCACHED | wanted


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("data", "mode", "sent_mode"),
    [("mount", "ro_mount", "ReadOnlyMount"), ("download", "download", "Download"), ("stream", "direct", "Direct")],
)
def test_inputs_that_name_no_mode_get_that_of_the_presets(send, placement, data, mode, sent_mode):
    given = {
        "plain": Input(type="uri_folder", path=URI),
        "fields": {"type": "uri_file", "path": URI},
        "table": Input(type="mltable", path=URI),
        "own": Input(type="uri_folder", path=URI, mode="ro_mount"),
        "model": Input(type="custom_model", path=URI),
        "lr": 0.1,
    }
    body, _, declared = send(placement, inputs=given, presets=Presets(data=data))
    modes = {name: value.get("mode") for name, value in body["inputs"].items()}
    assert modes == {
        "plain": sent_mode,
        "fields": sent_mode,
        "table": sent_mode,
        "own": "ReadOnlyMount",
        "model": None,
        "lr": None,
    }
    if placement == "fan_out":
        assert {name: value.get("mode") for name, value in declared.items()} == {
            **dict.fromkeys(("plain", "fields", "table"), mode),
            "own": "ro_mount",
            "model": None,
            "lr": None,
        }
    assert given["plain"].mode is None
    assert given["fields"] == {"type": "uri_file", "path": URI}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_shipped_library_is_downloaded_whatever_the_presets_say(send, placement):
    body, _, _ = send(placement, delivery="ship", presets=Presets(data="stream"))
    assert body["inputs"]["azureml_elastic_runtime"]["mode"] == "Download"


def shown(**fields):
    return [line.split(None, 1)[1] for line in str(small_job(**fields)).splitlines() if line.startswith("  presets ")]


def test_the_presets_are_shown_where_they_do_something():
    one = ElasticResources(max_instance_count=2)
    assert shown(resources=one) == []
    assert shown(resources=one.model_copy(update={"instance_type": RDMA})) == ["network infiniband"]
    assert shown(resources=one, compute=[NodePool("a", max_instance_count=2), NodePool("b", max_instance_count=2)]) == [
        "network ethernet"
    ]
    presets = Presets(network=None, mount="cached", data="download")
    assert shown(resources=one, presets=presets) == ["mount cached, data download, network off"]
    assert shown(resources=one, presets={"mount": None}) == ["mount off"]
