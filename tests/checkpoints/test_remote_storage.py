"""Checkpoints in Azure's blobs, without a mount, on the real emulator."""

from __future__ import annotations

import os
import uuid

import fsspec
import pytest
import torch
from torch import nn

from azureml_elastic import train
from azureml_elastic.checkpoints.remote_storage import RemoteStorage
from azureml_elastic.checkpoints.storage import open_storage, place_in
from azureml_elastic.local.azurite import Azurite
from azureml_elastic.spec import CheckpointPolicy

# Of aiohttp, about how adlfs hands it what it uploads.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(scope="module")
def blobs():
    with Azurite(service="blob") as emulator:
        yield emulator


@pytest.fixture
def url(blobs, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", blobs.connection_string)
    container = f"c{uuid.uuid4().hex}"
    fsspec.filesystem("abfs", connection_string=blobs.connection_string).mkdir(container)
    return f"abfs://{container}/runs/r1"


def test_what_is_written_is_read_and_has_its_checksum(url):
    storage = open_storage(url)
    assert isinstance(storage, RemoteStorage)
    content = os.urandom(20_000_003)
    sums = storage.write("f", "a", [content[:7], memoryview(content)[7:]])
    assert sums.size == len(content) == storage.size("f", "a")
    assert storage.read("f", "a") == content
    assert storage.problem("f", "a", sums) is None
    part = bytearray(9_000_000)
    with storage.reading("f", "a") as fill:
        fill(5, memoryview(part))
    assert part == content[5:9_000_005]
    storage.publish("f", "m", b"manifest")
    storage.write("f", "empty", [])
    assert storage.files("f") == {"a": len(content), "m": 8, "empty": 0}
    assert storage.folders() == ["f"]
    storage.remove("f", "m")
    assert storage.folders() == []
    assert storage.problem("f", "a", sums) is not None


def test_a_write_that_fails_leaves_nothing(url):
    storage = open_storage(url)

    def blocks():
        yield os.urandom(9_000_000)
        raise OSError("the source failed")

    with pytest.raises(OSError, match="the source failed"):
        storage.write("f", "a", blocks())
    assert storage.files("f") == {}


def test_reading_beyond_the_end_is_an_error(url):
    storage = open_storage(url)
    storage.write("f", "a", [b"12345"])
    with storage.reading("f", "a") as fill, pytest.raises(OSError, match="f/a"):
        fill(3, memoryview(bytearray(3)))


def test_what_is_not_there_is_nothing(url):
    storage = open_storage(place_in(url, "elsewhere"))
    assert storage.folders() == []
    assert storage.files("f") == {}
    assert storage.size("f", "a") is None
    with pytest.raises(FileNotFoundError):
        storage.read("", "latest.json")


def test_a_run_keeps_its_checkpoints_there(url, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for start in (0, 5):
        model = nn.Linear(3, 2)
        with train.start(CheckpointPolicy(path=url, every=None, every_steps=2)) as run:
            run.track(model=model, optimizer=torch.optim.Adam(model.parameters()))
            assert run.steps == start
            for step in range(start, start + 5):
                with torch.no_grad():
                    model.weight.fill_(step + 1)
                run.step()
    with train.start(CheckpointPolicy(path=url)) as run:
        model = nn.Linear(3, 2)
        run.track(model=model, optimizer=torch.optim.Adam(model.parameters()))
        assert run.steps == 10
        assert model.weight.unique().tolist() == [10.0]
    assert [name[:17] for name in open_storage(url).folders()] == ["step-000000000008", "step-000000000010"]
