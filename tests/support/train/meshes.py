"""Functions of the processes in the tests of sharded models on a mesh."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from azureml_elastic import train
from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, ElasticResources, Plan
from azureml_elastic.distributed.process_groups import ReplicaGroup, is_peer_error
from azureml_elastic.errors import CheckpointDamaged, UsageError
from azureml_elastic.ipc.agent_interface import HandedOverState, HeldCopies
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from tests.support.train import workers
from tests.support.waiting import until

GLOBAL_BATCH = 7


def plan(nodes_per_replica):
    distribution = ElasticDistribution(nodes_per_replica=nodes_per_replica)
    return Plan(resources=ElasticResources(max_instance_count=8), distribution=distribution).to_json()


def start(folder, nodes_per_replica, per_node, every_steps=None):
    """Start a session as on nodes of so many workers each."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_node)
    os.environ["AZUREML_ELASTIC_PLAN"] = plan(nodes_per_replica)
    return train.start(workers.policy(folder, every_steps))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(tracked):
    """Return a checksum of all weights and of the optimizer's state."""
    tensors = tracked.collect(is_main=True)[1]
    content = b"".join(name.encode() + whole(tensors[name]).detach().numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(content).hexdigest()


def sharded(mesh, tensor_parallel=1):
    model = workers.network()
    if tensor_parallel > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["replicate", "shard"]
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_on_mesh(folder, nodes_per_replica, per_node, until, tensor_parallel=1):
    """Train up to a number of steps; return the mesh's shape, the weights, states and the samples of each step."""
    run = start(folder, nodes_per_replica, per_node)
    mesh = run.mesh(tensor_parallel=tensor_parallel)
    model = sharded(mesh, tensor_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    begins, samples = digest(run._run.state.tracked), []
    loader = run.loader(workers.dataset(), global_batch_size=GLOBAL_BATCH)
    for _ in run.epochs(1_000):
        for x, y in loader:
            samples.append(x[:, 0].tolist())
            workers.one_step(run, model, optimizer, x, y)
            if run.steps == until:
                break
        if run.steps == until:
            break
    measured = run.evaluate(lambda batch: {"x": batch[0].sum()}, workers.dataset(), batch_size=8)
    run.finish()
    weights = workers.flat(whole(each) for each in model.parameters()).tolist()
    return {
        "shape": tuple(mesh.shape),
        "names": mesh.mesh_dim_names,
        "begins": begins,
        "ends": digest(run._run.state.tracked),
        "weights": weights,
        "samples": samples,
        "measured": measured["x"],
    }


def gradients_of_tokens(folder, nodes_per_replica, per_node, tensor_parallel=1):
    """Return the gradient of each step of an epoch whose losses are means over tokens."""
    run = start(folder, nodes_per_replica, per_node)
    model = sharded(run.mesh(tensor_parallel=tensor_parallel), tensor_parallel)
    run.track(model=model)
    found = []
    for x, y in run.loader(workers.dataset(), global_batch_size=GLOBAL_BATCH):
        tokens = max(1, int(y.sum()))
        run.backward(nn.functional.cross_entropy(model(x), y, reduction="sum") / tokens, count=tokens)
        found.append(workers.flat(whole(each.grad) for each in model.parameters()).tolist())
        model.zero_grad()
        run.commit()
    run.finish()
    return found


class HoldingAgent(StandaloneAgent):
    """An agent that would hold snapshots and holds any states, and whose table names any checkpoint."""

    holds_snapshots = hands_whole_over = True
    reference, states = None, ()

    def held(self):
        return HeldCopies([*self.states])

    def pointer(self):
        return self.reference


def snapshots_taken(folder, per_node, kinds, policies):
    """Return by state and policy whether snapshots are taken: at first, once the round has settled, in the next."""
    run = start(folder, 1, per_node)
    world, storage = run._run.lifecycle.world, LocalStorage(Path(folder))
    agent = HoldingAgent(storage, world.identity, handles_signals=False)
    models = {
        "replicated": workers.network,
        "replicas": lambda: sharded(run.mesh()),
        "sharded": lambda: fully_shard(workers.network()),
    }
    found = {}
    for kind in kinds:
        state = TrackedState({"model": models[kind]()})
        for name, policy in policies.items():
            checkpoints = Checkpoints(CheckpointPolicy(**policy), storage, world, agent)
            before = checkpoints.snapshots
            checkpoints.prepare(state)
            settled = checkpoints.snapshots
            checkpoints.enter()
            found[kind, name] = before, settled, checkpoints.snapshots
    run.finish()
    return found


def refused(folder, nodes_per_replica, per_node, tensor_parallel):
    """Return why there is no mesh."""
    run = start(folder, nodes_per_replica, per_node)
    try:
        run.mesh(tensor_parallel=tensor_parallel)
    except UsageError as error:
        return str(error)
    return None


def hand_over_and_find(folder, cases, tensor_parallel):
    """Hand parts over at different steps, and find a whole state in what is left, case by case.

    A case has the step that each rank has completed, ``None`` where it is lost, and the step of the checkpoint. A tenth
    more is the same step of another round, which had gone back. The weights and the buffer are the step's number; the
    buffer is the rank's hundredth more.
    """
    run = start(folder, 1, 2)
    world, rank = run._run.lifecycle.world, run.rank
    storage, found = LocalStorage(Path(folder)), []
    agent = HoldingAgent(storage, world.identity, handles_signals=False)
    checkpoints = Checkpoints(CheckpointPolicy(), storage, world, agent, stale_seconds=0.0)
    model = sharded(run.mesh(tensor_parallel=tensor_parallel), tensor_parallel)
    model.register_buffer("seen", torch.zeros(()))
    tracked = TrackedState({"model": model})
    for steps, committed in cases:
        agent.states = []
        step = None if steps[rank] is None else int(steps[rank])
        origin = 1 if step == steps[rank] else 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1.0 if step is None else step)
            model.seen.fill_(-1.0 if step is None else step + rank / 100)
        if step is not None:
            plain, tensors, apart = tracked.collect_held()
            held = Snapshot(step, plain, {"at": step}, origin=origin, apart=apart, tensors=local_chunks(tensors))
            path = f"/proc/{os.getpid()}/fd/{held.to_memory()}"
            agent.states = [HandedOverState(path, step, 1, rank, run.local_rank)]
        agent.reference = Reference(f"step-{committed}", committed, "") if committed else None
        source = None
        with contextlib.suppress(CheckpointDamaged):  # what would be restored instead is not there
            source = checkpoints.find()
        if source is None:
            found.append(None)
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-2.0)
        tracked.restore(source.state, source.read(tracked.targets(source.state), world.control))
        values = {float(each) for parameter in model.parameters() for each in whole(parameter).flatten()}
        found.append((source.content.step, source.content.data, values, round(float(model.seen), 2)))
    return found


def complete_or_not(folder, kind):
    """Lose replica 0 while the ranks of replica 1 come to their agreement one after the other; return who agreed."""
    run = start(folder, 1, 2)
    groups = run._run.lifecycle.world
    group = ReplicaGroup(groups, [[0, 1], [2, 3]])
    (folder / f"started-{run.rank}").touch()
    until(lambda: len([*folder.glob("started-*")]) == 4)  # one that leaves earlier breaks groups that others still open
    if run.rank < 2:
        os._exit(9)
    if run.rank == 2:
        threading.Timer(0.2, groups.abort).start()
    else:
        groups.abort()
        time.sleep(0.6)
        if kind == "fails":
            os._exit(9)
    try:
        group.agree()
    except RuntimeError as error:
        os._exit(7 if is_peer_error(error) else 1)
    os._exit(5)
