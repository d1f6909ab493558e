"""Presets: which VM sizes have InfiniBand, how nodes are connected, which variables and steps follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from azureml_elastic.config import ElasticResources, Plan, Presets, Profile
from azureml_elastic.config.policies import recorded_after
from azureml_elastic.config.presets import connection, has_infiniband, mode_of_input

WITH = [
    "Standard_NC24r",
    "Standard_NC24rs_v3",
    "STANDARD_NC24RS_V3",
    "standard_nd40rs_v2",
    "Standard_ND96asr_v4",
    "Standard_ND96amsr_A100_v4",
    "Standard_ND96isr_H100_v5",
    "Standard_ND96isr_H200_v5",
    "Standard_ND96isr_MI300X_v5",
    "Standard_ND128isr_NDR_GB200_v6",
    "Standard_HB120rs_v3",
    "Standard_HB120-16rs_v3",
    "Standard_HC44rs",
    "Standard_H16mr",
    "ND96asr_v4",
]
WITHOUT = [
    "Standard_NC6",
    "Standard_NC6s_v3",
    "Standard_NC24ads_A100_v4",
    "Standard_NC4as_T4_v3",
    "Standard_NV36ads_A10_v5",
    "Standard_ND96is_H100_v5",
    "Standard_NC80adis_H100_v5",
    "Standard_D13_v2",
    "Standard_DS3_v2",
    "Standard_E8-2ads_v5",
    "Standard_M416ms_v2",
    "Standard_F4s_v2_Promo_r",
    "",
    "r",
    "serverless",
]
RDMA, PLAIN = "Standard_ND96asr_v4", "Standard_NC6s_v3"


@pytest.mark.parametrize("size", WITH)
def test_sizes_with_infiniband(size):
    assert has_infiniband(size)


@pytest.mark.parametrize("size", WITHOUT)
def test_sizes_without_infiniband(size):
    assert not has_infiniband(size)


@pytest.mark.parametrize(
    ("sizes", "together", "wanted"),
    [
        ([RDMA], True, "infiniband"),
        ([RDMA, RDMA], True, "infiniband"),
        ([PLAIN], True, None),
        ([None], True, None),
        ([RDMA, PLAIN], True, "ethernet"),
        ([RDMA, None], True, "ethernet"),
        ([RDMA], False, "ethernet"),
        ([None], False, "ethernet"),
        ([PLAIN, None], False, "ethernet"),
        ([PLAIN, PLAIN], False, None),
        ([], True, None),
        ([], False, None),
    ],
)
def test_the_connection_is_chosen_by_what_all_nodes_have(sizes, together, wanted):
    assert connection("auto", sizes, together=together) == wanted


@given(sizes=st.lists(st.sampled_from([RDMA, PLAIN, None])), together=st.booleans())
def test_what_is_said_is_what_is_taken(sizes, together):
    for network in ("infiniband", "ethernet", None):
        assert connection(network, sizes, together=together) == network


@given(sizes=st.lists(st.sampled_from([RDMA, PLAIN, None]), min_size=1), together=st.booleans())
def test_infiniband_is_disabled_where_it_does_not_reach_every_peer(sizes, together):
    chosen = connection("auto", sizes, together=together)
    if chosen == "infiniband":
        assert together
        assert set(sizes) == {RDMA}
    if RDMA in sizes and (not together or set(sizes) != {RDMA}):
        assert chosen == "ethernet"


def test_the_variables_of_each_preset():
    both = Presets(network="infiniband").environment_variables([None], together=True)
    assert both == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_DEBUG": "WARN",
        "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL": "1",
        "DATASET_MOUNT_CACHE_SIZE": "0",
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "False",
        "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "False",
        "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
    }
    only = Presets(network="ethernet", mount=None).environment_variables([RDMA], together=True)
    assert only == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert Presets(network=None, mount=None).environment_variables([RDMA], together=True) == {}


@pytest.mark.parametrize("mount", ["uncached", "prefetched", "cached"])
def test_every_way_to_mount_shows_what_others_write(mount):
    variables = Presets(network=None, mount=mount).environment_variables([], together=True)
    assert variables["DATASET_MOUNT_ATTRIBUTE_CACHE_TTL"] == "1"
    assert all(name.startswith("DATASET_MOUNT_") for name in variables)


def test_the_cache_leaves_more_of_the_disk_free_than_a_node_must_have():
    variables = Presets(mount="cached").environment_variables([], together=True)
    health = Plan(resources=ElasticResources(max_instance_count=1)).health
    assert -int(variables["DATASET_MOUNT_CACHE_SIZE"]) > 2 * health.disk_mib * 1024**2


@pytest.mark.parametrize(
    ("data", "kind", "wanted"),
    [
        ("mount", "uri_folder", "ro_mount"),
        ("download", "uri_file", "download"),
        ("stream", "mltable", "direct"),
        ("download", "custom_model", None),
        ("stream", "mlflow_model", None),
        ("mount", "string", None),
        (None, "uri_folder", None),
    ],
)
def test_the_mode_of_an_input(data, kind, wanted):
    assert mode_of_input(data, kind) == wanted


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Presets(network="rdma"), "network"),
        (lambda: Presets(mount="off"), "mount"),
        (lambda: Presets(colour="red"), "colour"),
        (lambda: Profile(first_step=0), "first_step"),
        (lambda: Profile(steps=0), "steps"),
        (lambda: Profile(warmup_steps=-1), "warmup_steps"),
        (lambda: Profile(steps=3, warmup_steps=2, every_steps=4), "every_steps=4 is below steps + warmup_steps = 5"),
        (lambda: Profile(ranks=()), "ranks=[] has none"),
        (lambda: Profile(ranks=(0, -1)), "ranks=[0, -1] has [-1]"),
        (lambda: Profile(ranks="some"), "ranks"),
        (lambda: Profile(folder=""), "folder"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, said):
    with pytest.raises(ValidationError) as refusal:
        make()
    assert said in str(refusal.value)


def test_ranks_are_in_order_and_once():
    assert Profile(ranks=(3, 0, 3)).ranks == (0, 3)


def test_a_profile_crosses_in_the_plan():
    profile = Profile(first_step=5, every_steps=100, ranks=(0, 2), folder="$X/traces")
    plan = Plan(resources=ElasticResources(max_instance_count=1), profile=profile)
    assert Plan.from_json(plan.to_json()).profile == profile
    assert Plan(resources=ElasticResources(max_instance_count=1)).profile is None


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (Profile(), "steps 10 to 12 on rank 0"),
        (Profile(first_step=5, steps=1, each_round=True, ranks=(1, 0)), "step 5 of each round on rank 0, 1"),
        (Profile(every_steps=50, ranks="all"), "steps 10 to 12, every 50 steps on all ranks"),
    ],
)
def test_a_profile_says_what_it_does(profile, text):
    assert str(profile) == text


@pytest.mark.parametrize(
    ("profile", "completed", "entered", "wanted"),
    [
        (Profile(first_step=10, steps=3), 0, 0, (10, 12)),
        (Profile(first_step=10, steps=3), 9, 0, (10, 12)),
        (Profile(first_step=10, steps=3), 10, 0, None),
        (Profile(first_step=10, steps=3, every_steps=20), 10, 0, (30, 32)),
        (Profile(first_step=10, steps=3, every_steps=20), 29, 0, (30, 32)),
        (Profile(first_step=10, steps=3, every_steps=20), 30, 0, (50, 52)),
        (Profile(first_step=1, steps=1, warmup_steps=0, every_steps=1), 7, 0, (8, 8)),
        (Profile(first_step=10, steps=3, each_round=True), 100, 100, (110, 112)),
        (Profile(first_step=10, steps=3, each_round=True), 110, 100, None),
        (Profile(first_step=10, steps=3, each_round=True, every_steps=20), 110, 100, (130, 132)),
    ],
)
def test_the_next_recording(profile, completed, entered, wanted):
    assert recorded_after(profile, completed, entered) == wanted


@given(
    first=st.integers(1, 50),
    steps=st.integers(1, 5),
    warmup=st.integers(0, 3),
    gap=st.one_of(st.none(), st.integers(0, 30)),
    completed=st.integers(0, 200),
)
def test_the_next_recording_is_the_nearest_whole_one(first, steps, warmup, gap, completed):
    every = None if gap is None else steps + warmup + gap
    profile = Profile(first_step=first, steps=steps, warmup_steps=warmup, every_steps=every)
    begins = [first] if every is None else range(first, 500, every)
    ahead = [begin for begin in begins if begin > completed]
    wanted = (ahead[0], ahead[0] + steps - 1) if ahead else None
    assert recorded_after(profile, completed, 0) == wanted
