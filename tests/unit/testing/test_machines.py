"""Pools and their machines."""

import threading

import pytest
from pydantic import ValidationError

from azureml_elastic.testing import Pool
from azureml_elastic.testing.jobs.machines import Machines


def test_machines_have_names_and_addresses_of_their_own():
    machines = Machines({"spot": Pool(nodes=3), "other": Pool(nodes=1, tier="dedicated")})
    taken = [*machines.take("spot", 3, lambda: False), machines.try_take("other")]
    assert len({machine.name for machine in taken}) == 4
    assert len({machine.address for machine in taken}) == 4
    assert all(machine.address.startswith("127.0.0.") and machine.address != "127.0.0.1" for machine in taken)
    assert [machine.tier for machine in taken] == ["low_priority"] * 3 + ["dedicated"]


def test_a_full_pool_has_no_machine_until_one_is_given_back():
    machines = Machines({"spot": Pool(nodes=1)})
    first = machines.try_take("spot")
    assert machines.try_take("spot") is None
    waiting = threading.Event()
    found = []

    def cancelled():
        waiting.set()
        return False

    thread = threading.Thread(target=lambda: found.extend(machines.take("spot", 1, cancelled)))
    thread.start()
    waiting.wait()
    assert not found
    machines.give_back(first)
    thread.join()
    assert found[0].name != first.name


def test_machines_are_given_all_at_once_or_not_at_all():
    machines = Machines({"spot": Pool(nodes=3)})
    machines.try_take("spot")
    answers = iter([False, True])
    assert machines.take("spot", 3, lambda: next(answers)) is None
    assert len(machines.take("spot", 2, lambda: False)) == 2


def test_an_evicted_machine_is_missing_until_the_pool_is_refilled():
    machines = Machines({"spot": Pool(nodes=1, refill=None)})
    machines.give_back(machines.try_take("spot"), evicted=True)
    assert machines.try_take("spot") is None
    machines.refill("spot")
    assert machines.try_take("spot").name == "spot-1"
    assert machines.try_take("spot") is None


@pytest.mark.parametrize("fields", [{"nodes": 0}, {"provisioning": -1}])
def test_an_invalid_pool_is_refused(fields):
    with pytest.raises(ValidationError):
        Pool(**fields)
