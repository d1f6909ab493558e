"""What is asked of a device without one: the seam, torch's variables, and groups that are not NCCL's."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist

from azureml_elastic.distributed.device import device_of
from tests.support.paths import ROOT

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SOURCES = ROOT / "src" / "azureml_elastic"
ASKING = re.compile(r"\bdevice\.type\b|\bis_cuda\b|torch\.cuda\.")
CHOICE = {
    "distributed/device.py",  # the seam
    "distributed/process.py",  # which device this process has
    "checkpoint/load/reading.py",  # whether memory can be written to by its address
}


def test_one_module_knows_the_kinds_of_devices():
    asking = {
        path.relative_to(SOURCES).as_posix()
        for folder in ("train", "checkpoint", "distributed")
        for path in (SOURCES / folder).rglob("*.py")
        if ASKING.search(path.read_text("utf-8"))
    }
    assert asking == CHOICE


def test_a_cpu_has_completed_what_it_was_asked_for():
    device = device_of(CPU)
    assert not device.runs_behind
    assert device.mark()()
    assert device.drain(0)
    assert device.queued_collectives() == ()
    value = torch.ones(2)
    fetched = device.fetch(value)
    value.zero_()
    assert fetched.arrived()
    assert fetched.read().tolist() == [1.0, 1.0], "the value is that of the call"


def test_torchs_threads_are_kept_out_unless_the_job_says_otherwise(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TORCH_NCCL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is set is undone
    device_of(GPU).keep_watchdog_out()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_groups_of_gloo_are_no_communicators_of_a_gpu(gloo):
    """A group of gloo serves GPUs as well: its collectives fail by themselves, on the host."""
    dist.all_reduce(torch.ones(1))
    device = device_of(GPU)
    assert device.queued_collectives() == ()
    assert device.communicator_error() is None
    device.abort()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("value", "stays"), [(None, False), ("0", False), ("1", True)])
def test_a_process_with_a_gpu_stays_only_if_it_was_asked_for(monkeypatch, value, stays):
    monkeypatch.delenv("AZUREML_ELASTIC_IN_PROCESS_ON_GPU", raising=False)
    if value is not None:
        monkeypatch.setenv("AZUREML_ELASTIC_IN_PROCESS_ON_GPU", value)
    assert device_of(GPU).may_stay == stays
    assert device_of(CPU).may_stay
