"""The advertised address: from the job, the environment, or the machine's routes."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil
import pytest

from azureml_elastic.config import ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.node.host.addresses import (
    AdvertisedAddress,
    Ports,
    advertised_address,
    format_address,
    interface_of,
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
    assert advertised_address(job, NodeEnvironment.read({})).host == "10.9.9.9"
    assert advertised_address(job, NodeEnvironment.read({variables.LOCAL_ADDRESS: "10.1.1.1"})) == AdvertisedAddress(
        "10.1.1.1"
    )
    assert advertised_address(
        job, NodeEnvironment.read({variables.LOCAL_ADDRESS: "a-name.example"})
    ) == AdvertisedAddress("a-name.example")
    assert advertised_address(job, NodeEnvironment.read({variables.LOCAL_ADDRESS: "lo"})) == AdvertisedAddress(
        "127.0.0.1", "lo"
    )
    assert advertised_address(job, NodeEnvironment.read({variables.LOCAL_ADDRESS: "127.0.0.0/8"})) == AdvertisedAddress(
        "127.0.0.1", "lo"
    )
    with pytest.raises(UsageError, match=rf"{variables.LOCAL_ADDRESS}='203\.0\.113\.0/24'"):
        advertised_address(job, NodeEnvironment.read({variables.LOCAL_ADDRESS: "203.0.113.0/24"}))
    assert advertised_address(TableRendezvous(endpoint="/tmp/t.sqlite"), NodeEnvironment.read({})) == AdvertisedAddress(
        "127.0.0.1"
    )


def test_a_nodes_identity_has_the_address_and_its_interface():
    plan = Plan(
        resources=ElasticResources(max_instance_count=2),
        rendezvous=TableRendezvous(endpoint="/tmp/t.sqlite", advertise="lo"),
        name="run",
    )
    identity = read_identity(NodeEnvironment.read({variables.PLAN: plan.to_json()}))
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
        ("198.51.100.7", "0.0.0.0"),
        ("node.example", "0.0.0.0"),
        ("2001:db8::7", "::"),
    ],
)
def test_addresses_of_this_machine_are_listened_on_alone(host, listens_on):
    assert listening_address(host) == listens_on


@contextlib.contextmanager
def listening_where_another_address_is_silent(host, other):
    """Listen on a port of the host on whose number nothing listens at the other address."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with contextlib.ExitStack() as unused:
        while True:
            listener = Ports().listen(listening_address(host), 5)
            silent = unused.enter_context(socket.socket(family))
            try:
                silent.bind((other, listener.getsockname()[1]))  # who does not listen refuses
                break
            except OSError:  # another process has this port
                unused.enter_context(listener)
        with listener:
            yield listener.getsockname()[:2]


def test_an_address_of_this_machine_is_not_reached_over_another_one():
    for host in {str(address) for found in machine_interfaces().values() for address in found}:
        other = "::1" if ":" in host else "127.0.0.1" if host != "127.0.0.1" else "127.0.0.2"
        if other == host:
            continue
        with listening_where_another_address_is_silent(host, other) as address:
            assert address[0] == host
            socket.create_connection(address, 20).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, address[1]), 20).close()


INTERFACES = {
    name: tuple(map(ipaddress.ip_address, addresses))
    for name, addresses in {
        "lo": ("127.0.0.1", "::1"),
        "eth0": ("10.0.0.4", "fd00::4"),
        "eth1": ("fd00::5", "10.0.1.4"),
        "vf0": ("10.0.2.4",),
        "vf1": ("10.0.2.4",),
    }.items()
}


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("10.0.0.4", "eth0"),
        ("127.0.0.1", "lo"),
        ("fd00::4", None),  # gloo would take the IPv4 address
        ("fd00::5", "eth1"),
        ("10.0.1.4", None),
        ("10.0.2.4", None),  # two interfaces have it
        ("10.0.3.4", None),
        ("node.example", None),
    ],
)
def test_the_interface_of_collectives_is_that_of_the_address_or_their_own_choice(host, interface):
    assert interface_of(host, INTERFACES) == interface


def test_a_host_and_a_port_in_one_word():
    assert format_address("10.0.0.4", 29400) == "10.0.0.4:29400"
    assert format_address("fd00::4", 29400) == "[fd00::4]:29400"
