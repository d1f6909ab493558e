"""Storages of each kind: a local folder, and blobs in the emulator."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.local.azurite import Azurite


@pytest.fixture(scope="session")
def blobs():
    with Azurite(service="blob") as emulator:
        yield emulator


@pytest.fixture
def url(blobs, monkeypatch):
    """A prefix in a new container."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", blobs.connection_string)
    container = f"c{uuid.uuid4().hex}"
    fsspec.filesystem("abfs", connection_string=blobs.connection_string).mkdir(container)
    return f"abfs://{container}/runs/r1"


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path):
    return open_storage(tmp_path / "c" if request.param == "local" else request.getfixturevalue("url"))
