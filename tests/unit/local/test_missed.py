"""The reasons that are given for faults that did not happen."""

import pytest

from azureml_elastic.local.faults.schedule import ChaosState, parse_schedule, reason_missed

TRAINED = ChaosState(step=40, seconds=12.34)
ONE = {"node-0": "exited"}
THREE = {"node-0": "exited", "node-1": "frozen", "node-2": "killed"}


@pytest.mark.parametrize(
    ("fault", "state", "nodes", "reason"),
    [
        ("kill=node-9@step:3", TRAINED, ONE, "there was no node-9; started were node-0"),
        ("kill=node-9@5s", TRAINED, {"node-0": "exited", "node-1": "exited"}, "started were node-0 to node-1"),
        ("freeze=node-3@5s", TRAINED, THREE, "there was no node-3; started were node-0 to node-2"),
        ("kill=node-9@step:41", TRAINED, THREE, "the run ended at step 40"),
        ("add@step:41", TRAINED, THREE, "the run ended at step 40"),
        ("kill=any@60s", TRAINED, THREE, "the run ended after 12.3 s of training"),
        ("kill=any@0s", ChaosState(), THREE, "the run ended before it trained"),
        ("kill=any@step:3", ChaosState(seconds=20.0), THREE, "the run reported no step; a script without a session"),
        ("kill=node-1@step:40", TRAINED, THREE, "node-1 was frozen"),
        ("kill=node-0@step:40", TRAINED, THREE, "the run was already ending, or had no such node left"),
        ("preempt=rank0@step:40", TRAINED, THREE, "the run was already ending, or had no such node left"),
        ("add@step:40", TRAINED, THREE, "the run was already ending when its time came"),
        ("table=outage@5s", TRAINED, THREE, "the run was already ending when its time came"),
    ],
)
def test_the_reason_that_a_fault_did_not_happen(fault, state, nodes, reason):
    assert reason in reason_missed(parse_schedule(fault).faults[0], state, nodes)
