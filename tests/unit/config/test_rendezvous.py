"""Ports and addresses of the rendezvous, as a job says them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from azureml_elastic.config import ElasticResources, Plan, TableRendezvous
from azureml_elastic.config.rendezvous import PORTS_OF_A_NODE


@pytest.mark.parametrize("ports", [(29400, 29500), (1024, 65535), (29400, 29400 + PORTS_OF_A_NODE - 1), None])
def test_a_range_of_ports(ports):
    assert TableRendezvous(port_range=ports).port_range == ports


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        ((29500, 29400), "port_range=29500-29400 must rise and lie within 1024-65535"),
        ((29400, 29400), "must rise"),
        ((80, 90), "port_range=80-90"),
        ((60000, 65536), "within 1024-65535"),
        ((29400, 29401), "port_range=29400-29401 has 2 ports; a node needs 3"),
    ],
)
def test_a_range_that_would_not_do_is_refused(ports, said):
    with pytest.raises(ValidationError, match=said):
        TableRendezvous(port_range=ports)


@pytest.mark.parametrize("where", ["eth0", "10.0.0.0/16", "fd00::/64", "10.0.0.4", "fd00::4", None])
def test_where_nodes_are_reached(where):
    assert TableRendezvous(advertise=where).advertise == where


@pytest.mark.parametrize(
    ("where", "said"),
    [("", "advertise"), ("eth 0", "advertise"), ("10.0.0.0/40", "advertise='10.0.0.0/40' is not a range of addresses")],
)
def test_what_is_no_address_is_refused(where, said):
    with pytest.raises(ValidationError, match=said):
        TableRendezvous(advertise=where)


def test_both_cross_to_the_nodes():
    rendezvous = TableRendezvous(port_range=(29400, 29500), advertise="ib0")
    plan = Plan(resources=ElasticResources(max_instance_count=2), rendezvous=rendezvous)
    assert Plan.from_json(plan.to_json()).rendezvous == rendezvous
