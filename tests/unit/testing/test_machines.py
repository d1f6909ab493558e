"""Pools and their machines."""

import pytest
from pydantic import ValidationError

from azureml_elastic.testing import Pool
from azureml_elastic.testing.jobs.machines import Machines


def test_machines_have_names_and_addresses_of_their_own():
    machines = Machines({"spot": Pool(nodes=3), "other": Pool(nodes=1, tier="dedicated")})
    taken = [*machines.take("spot", 3), *machines.take("other", 1)]
    assert len({machine.name for machine in taken}) == 4
    assert len({machine.address for machine in taken}) == 4
    assert all(machine.address.startswith("127.0.0.") and machine.address != "127.0.0.1" for machine in taken)
    assert [machine.tier for machine in taken] == ["low_priority"] * 3 + ["dedicated"]


def test_a_full_pool_has_no_machine_until_one_is_given_back():
    machines = Machines({"spot": Pool(nodes=1)})
    (first,) = machines.take("spot", 1)
    assert machines.take("spot", 1) == ()
    machines.give_back(first)
    (second,) = machines.take("spot", 1)
    assert second.name != first.name


def test_machines_are_given_all_at_once_or_not_at_all():
    machines = Machines({"spot": Pool(nodes=3)})
    machines.take("spot", 1)
    assert machines.take("spot", 3) == ()
    assert len(machines.take("spot", 2)) == 2


def test_an_evicted_machine_is_missing_until_the_pool_is_refilled():
    machines = Machines({"spot": Pool(nodes=1, refill=None)})
    machines.give_back(*machines.take("spot", 1), evicted=True)
    assert machines.take("spot", 1) == ()
    machines.refill("spot")
    assert [machine.name for machine in machines.take("spot", 1)] == ["spot-1"]
    assert machines.take("spot", 1) == ()


@pytest.mark.parametrize("fields", [{"nodes": 0}, {"provisioning": -1}])
def test_an_invalid_pool_is_refused(fields):
    with pytest.raises(ValidationError):
        Pool(**fields)
