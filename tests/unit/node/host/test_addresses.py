"""The advertised address: from the job, the environment, or the machine's routes."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan, TableRendezvous
from azureml_elastic.config import environment as variables
from azureml_elastic.errors import UsageError
from azureml_elastic.node.host.addresses import (
    AdvertisedAddress,
    advertised_address,
    format_address,
    is_loopback,
    listening_address,
    local_address,
    machine_interfaces,
    select_address,
)
from azureml_elastic.node.host.identity import read_identity

THERE = {
    "lo": (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")),
    "eth0": (ipaddress.ip_address("fd00::4"), ipaddress.ip_address("10.0.0.4")),
    "ib0": (ipaddress.ip_address("172.16.1.4"),),
    "wg0": (ipaddress.ip_address("fd01::4"),),
    "docker0": (),
}


@pytest.mark.parametrize(
    ("wanted", "host", "interface"),
    [
        ("eth0", "10.0.0.4", "eth0"),
        ("ib0", "172.16.1.4", "ib0"),
        ("wg0", "fd01::4", "wg0"),
        ("10.0.0.0/16", "10.0.0.4", "eth0"),
        ("10.0.0.4/16", "10.0.0.4", "eth0"),
        ("0.0.0.0/0", "127.0.0.1", "lo"),
        ("fd00::/64", "fd00::4", "eth0"),
        ("20.1.2.3", "20.1.2.3", None),
        ("FD00:0::9", "fd00::9", None),
    ],
)
def test_an_interface_a_range_or_an_address(wanted, host, interface):
    assert select_address(wanted, THERE, "advertise") == AdvertisedAddress(host, interface)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("eth1", "this machine has no network interface 'eth1'"),
        ("docker0", "the interface 'docker0' has no address"),
        ("192.168.0.0/24", "no address of this machine is in 192.168.0.0/24"),
        ("node.example", "this machine has no network interface 'node.example'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(wanted, problem):
    with pytest.raises(UsageError) as caught:
        select_address(wanted, THERE, "advertise")
    assert str(caught.value).startswith(f"advertise={wanted!r}: {problem}. There are: docker0 (no address), ")
    for there in ("eth0 (fd00::4, 10.0.0.4)", "ib0 (172.16.1.4)", "lo (127.0.0.1, ::1)"):
        assert there in str(caught.value)


def test_the_interfaces_of_this_machine():
    found = machine_interfaces()
    assert found.keys() == psutil.net_if_addrs().keys()
    assert ipaddress.ip_address("127.0.0.1") in found["lo"]
    assert not any(address.is_link_local for addresses in found.values() for address in addresses)


def test_the_environment_comes_before_the_job():
    job = TableRendezvous(endpoint="/tmp/t.sqlite", advertise="10.9.9.9")
    assert advertised_address(job, {}).host == "10.9.9.9"
    assert advertised_address(job, {variables.LOCAL_ADDRESS: "10.1.1.1"}) == AdvertisedAddress("10.1.1.1")
    assert advertised_address(job, {variables.LOCAL_ADDRESS: "a-name.example"}) == AdvertisedAddress("a-name.example")
    assert advertised_address(job, {variables.LOCAL_ADDRESS: "lo"}) == AdvertisedAddress("127.0.0.1", "lo")
    assert advertised_address(job, {variables.LOCAL_ADDRESS: "127.0.0.0/8"}) == AdvertisedAddress("127.0.0.1", "lo")
    with pytest.raises(UsageError, match=rf"{variables.LOCAL_ADDRESS}='203\.0\.113\.0/24'"):
        advertised_address(job, {variables.LOCAL_ADDRESS: "203.0.113.0/24"})
    assert advertised_address(TableRendezvous(endpoint="/tmp/t.sqlite"), {}) == AdvertisedAddress("127.0.0.1")


def test_a_nodes_identity_has_the_address_and_its_interface():
    plan = Plan(
        resources=ElasticResources(max_instance_count=2),
        distribution=ElasticDistribution(rendezvous=TableRendezvous(endpoint="/tmp/t.sqlite", advertise="lo")),
        run_id="run",
    )
    identity = read_identity({variables.PLAN: plan.to_json()})
    assert (identity.host, identity.interface) == ("127.0.0.1", "lo")


@pytest.mark.parametrize("endpoint", [None, "https://no-such-account.table.core.invalid"])
def test_without_a_way_to_the_table_it_is_the_way_to_everywhere(endpoint):
    host = local_address(endpoint)
    assert not is_loopback(host)
    if host != socket.getfqdn():  # a machine without any network has only its name
        assert ipaddress.ip_address(host) in {each for found in machine_interfaces().values() for each in found}


@pytest.mark.parametrize(
    ("host", "listens_on"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.7", "127.0.0.7"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("10.0.0.4", "0.0.0.0"),
        ("node.example", "0.0.0.0"),
        ("fd00::4", "::"),
    ],
)
def test_a_loopback_address_is_listened_on_alone(host, listens_on):
    assert listening_address(host) == listens_on


def test_a_host_and_a_port_in_one_word():
    assert format_address("10.0.0.4", 29400) == "10.0.0.4:29400"
    assert format_address("fd00::4", 29400) == "[fd00::4]:29400"
