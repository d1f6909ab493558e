"""What only a GPU can show of the device behind the host."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process import open_group
from azureml_elastic.distributed.process_groups import is_peer_error
from azureml_elastic.errors import RoundBroken
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.session.step_checks import UpdateGuard
from tests.support.shards import by_name
from tests.support.train.fake_agent import InterruptibleAgent
from tests.support.worlds import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch finds none here")

GPU = torch.device("cuda", 0)
LONG = 500_000_000
"""Cycles of a kernel that takes some 0.3 s."""


def test_a_mark_is_reached_when_the_work_before_it_is_done():
    device = device_of(GPU)
    torch.cuda._sleep(LONG)
    reached = device.mark()
    assert not reached()
    assert device.drain(60)
    assert reached()


def test_a_device_that_hangs_is_not_waited_for():
    device = device_of(GPU)
    torch.cuda._sleep(4 * LONG)
    assert not device.drain(0.01)
    assert device.drain(60)


def test_a_state_is_handed_over_through_pinned_memory():
    torch.manual_seed(0)
    model = nn.Linear(300, 200, device=GPU)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    model(torch.randn(8, 300, device=GPU)).square().mean().backward()
    optimizer.step()
    tracked = TrackedState({"model": model, "optimizer": optimizer})
    plain, tensors = tracked.collect(is_main=True)
    memory = Snapshot(1, plain, None, tensors=local_chunks(tensors)).to_memory(GPU)
    kept = Snapshot.from_memory(f"/proc/{os.getpid()}/fd/{memory}")
    other = nn.Linear(300, 200, device=GPU)
    again = torch.optim.AdamW(other.parameters(), fused=True, capturable=True)
    restored = TrackedState({"model": other, "optimizer": again})
    with torch.no_grad():
        restored.restore(kept.state, by_name(kept))
    for name, tensor in restored.collect(is_main=True)[1].items():
        assert tensor.device == tensors[name].device
        assert torch.equal(tensor, tensors[name]), name


def test_the_generator_of_the_gpu_continues():
    state = random_state.capture(GPU)
    first = torch.randn(5, device=GPU)
    random_state.restore(state, GPU)
    assert torch.equal(torch.randn(5, device=GPU), first)


def test_a_value_is_fetched_without_waiting():
    device = device_of(GPU)
    torch.cuda._sleep(LONG)
    fetched = device.fetch(torch.full((2,), 3.0, device=GPU))
    assert not fetched.arrived()
    assert fetched.read().tolist() == [3.0, 3.0]


def abort_and_open_again():
    """Abort NCCL's communicator behind a long kernel, and make another one; return what was seen."""
    os.environ["AZUREML_ELASTIC_CHANNEL"] = "as under an agent"
    torch.cuda.set_device(GPU)
    identity, device, agent = WorkerIdentity(0, 0, 1, 1), device_of(GPU), InterruptibleAgent()
    open_group(identity, GPU)
    guard = UpdateGuard(device, agent)
    guard.enter(2)
    values = torch.ones(1 << 20, device=GPU)
    dist.all_reduce(values)
    guard.wait()
    seen = {"counted": device.queued_collectives(), "error": device.communicator_error()}
    torch.cuda._sleep(LONG)
    dist.all_reduce(values)

    def interrupt():
        agent.interrupted.set()
        device.abort()

    receiver = threading.Thread(target=interrupt)
    receiver.start()
    try:
        guard.wait()
    except RoundBroken as error:
        seen["guard"] = str(error)
    receiver.join()
    seen["drained"] = device.drain(60)
    try:
        dist.all_reduce(values)
        torch.cuda.synchronize()
    except (RuntimeError, dist.DistError) as error:
        seen["peer error"] = is_peer_error(error)
    time.sleep(2)  # torch's watchdog looks every 0.1 s: it would end this process
    dist.destroy_process_group()
    agent.interrupted.clear()
    open_group(identity, GPU)
    values.fill_(2)
    dist.all_reduce(values)
    seen["again"] = float(values.sum())
    dist.destroy_process_group()
    return seen


def test_an_abort_ends_the_wait_and_leaves_the_process():
    (seen,) = World(1, abort_and_open_again).values()
    assert sum(seen["counted"]) >= 1
    assert seen["error"] is None
    assert "interrupted" in seen["guard"]
    assert seen["drained"]
    assert seen["peer error"]
    assert seen["again"] == 2 * (1 << 20)
