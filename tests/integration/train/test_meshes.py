"""Sharded models with replicas and with tensor parallelism: trained, saved, and continued on other meshes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from azureml_elastic.train.data.sampling import DataSpec, order
from tests.support.train import meshes, workers
from tests.support.worlds import World


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of one process after 18 steps."""
    (whole,) = World(1, meshes.train_on_mesh, tmp_path_factory.mktemp("whole"), 1, 1, 18).values()
    return whole


HISTORIES = {
    # (number of ranks, nodes per replica, ranks per node, tensor parallelism, until which step, the mesh)
    "replicas of a node": [
        (4, 1, 2, 1, 6, (2, 2)), (2, 1, 2, 1, 12, (1, 2)), (6, 1, 2, 1, 18, (3, 2)),
    ],
    "replicas of two nodes": [
        (4, 2, 1, 1, 6, (2, 2)), (2, 2, 1, 1, 12, (1, 2)), (4, 1, 1, 1, 18, (4, 1)),
    ],
    "tensor parallel": [
        (4, 1, 2, 2, 6, (2, 1, 2)), (2, 1, 2, 2, 12, (1, 1, 2)), (4, "all", 2, 2, 18, (1, 2, 2)),
    ],
}  # fmt: skip


@pytest.mark.shards_on_cpus
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_any_meshes_train_what_one_run_would_have(history, undisturbed, tmp_path):
    ended, samples = None, []
    for size, nodes_per_replica, per_node, tensor, until, shape in history:
        world = World(size, meshes.train_on_mesh, tmp_path, nodes_per_replica, per_node, until, tensor)
        values = world.values()
        assert {value["shape"] for value in values} == {shape}
        names = ("replicate", "shard", "tensor")
        assert {value["names"] for value in values} == {names[: len(shape)]}
        # Bit by bit: what was saved by the ranks of another mesh.
        assert {value["begins"] for value in values} == {ended or values[0]["begins"]}
        (ended,) = {value["ends"] for value in values}
        samples += together([value["samples"] for value in values], tensor)
        for value in values:
            assert value["measured"] == pytest.approx(undisturbed["measured"])
    assert samples == [{*step} for step in undisturbed["samples"]]
    weights = torch.tensor(values[0]["weights"]), torch.tensor(undisturbed["weights"])
    assert torch.allclose(*weights, rtol=0, atol=1e-9)


def together(samples, tensor):
    """Return the samples of each step, of ranks of which so many see the same ones."""
    steps = []
    for step in zip(*samples, strict=True):
        groups = [step[first : first + tensor] for first in range(0, len(step), tensor)]
        assert all(each == group[0] for group in groups for each in group)
        # A set: a rank without samples repeats one, with a weight of 0.
        steps.append({sample for group in groups for sample in group[0]})
    return steps


@pytest.mark.shards_on_cpus
@pytest.mark.parametrize(
    ("nodes_per_replica", "per_node", "tensor"), [(1, 2, 1), (1, 2, 2)], ids=["replicas", "tensor parallel"]
)
def test_means_over_tokens_are_weighted_by_tokens(nodes_per_replica, per_node, tensor, tmp_path):
    spec = DataSpec(50, global_batch_size=meshes.GLOBAL_BATCH, seed=0, shuffle=True, drop_last=False)
    x, y = workers.dataset().tensors
    model, ids = workers.network(), torch.from_numpy(order(spec, 0)(np.arange(meshes.GLOBAL_BATCH)))
    nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="sum").backward()
    shares = np.array_split(ids, 4 // tensor)
    expected = workers.flat(each.grad for each in model.parameters()) / sum(
        max(1, int(y[each].sum())) for each in shares
    )
    world = World(4, meshes.gradients_of_tokens, tmp_path, nodes_per_replica, per_node, tensor)
    for found in world.values():
        assert torch.allclose(torch.tensor(found[0], dtype=expected.dtype), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("nodes_per_replica", "per_node", "tensor", "why"),
    [
        (2, 1, 1, "The 3 workers of this round are no whole replicas of 2: nodes_per_replica=2 of 1 worker each."),
        (1, 1, 2, "tensor_parallel=2 does not divide the 1 worker of a node."),
        (1, 2, 1, "run.mesh() needs the same number of workers on each node, but the nodes of this round have 2, 1."),
    ],
)
def test_workers_that_cannot_be_divided_are_refused(nodes_per_replica, per_node, tensor, why, tmp_path):
    for found in World(3, meshes.refused, tmp_path, nodes_per_replica, per_node, tensor).values():
        assert found.startswith(why)


@pytest.mark.parametrize("tensor", [1, 2], ids=["replicas", "tensor parallel"])
def test_survivors_go_on_from_the_furthest_step_of_which_all_parts_are_there(tensor, tmp_path):
    # Ranks 0 and 1 are one replica, 2 and 3 the other; 0 and 2 have one half of the state, 1 and 3 the other one.
    cases = [
        ((5, 5, 5, 5), 0),
        ((5, 5, 6, 6), 0),
        ((6, 5, 5, 6), 0),
        ((None, 6, 6, None), 0),
        ((None, 6, 5, 5), 0),
        ((6, 5, None, 5), 0),
        ((None, 6, None, 6), 0),
        ((5, 5.1, None, 5), 0),
        ((5, 5.1, None, None), 0),
        ((None, 4, 4, None), 5),
        ((None, None, None, None), 0),
    ]
    expected = [(5, 0.0), (6, 0.02), (6, 0.0), (6, 0.01), (5, 0.02), None, None, (5, 0.0), None, None, None]
    for found in World(4, meshes.hand_over_and_find, tmp_path, cases, tensor).values():
        wanted = [each and (each[0], {"at": each[0]}, {float(each[0])}, each[0] + each[1]) for each in expected]
        assert found == wanted


def test_snapshots_are_taken_by_default_where_a_lost_worker_has_a_part_alone(tmp_path):
    policies = {"auto": {}, "steps": {"snapshot_every_steps": 5}, "none": {"snapshot_every": None}}
    always, never, once_settled = (True, True, True), (False, False, False), (False, True, False)

    def expected(**auto):
        return {
            (kind, policy): {"auto": chosen, "steps": always, "none": never}[policy]
            for kind, chosen in auto.items()
            for policy in policies
        }

    several = expected(replicated=never, replicas=never, sharded=once_settled)
    kinds = ("replicated", "replicas", "sharded")
    assert World(4, meshes.snapshots_taken, tmp_path, 2, kinds, policies).values() == [several] * 4
    alone = expected(replicated=once_settled)
    assert World(1, meshes.snapshots_taken, tmp_path, 1, ("replicated",), policies).values() == [alone]


@pytest.mark.parametrize(("kind", "codes"), [("agrees", {5: 2}), ("fails", {7: 1, 9: 1})])
def test_all_ranks_of_a_replica_complete_a_step_or_none(kind, codes, tmp_path):
    outcomes = World(4, meshes.complete_or_not, tmp_path, kind).outcomes()
    assert Counter(outcome.code for outcome in outcomes[2:]) == codes
