"""A run with checkpoints in Azure blob storage, without a mount, in the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from azureml_elastic import train
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.checkpoint.storage.remote import RemoteStorage
from azureml_elastic.config import CheckpointPolicy

# aiohttp warns of the size of uploads by adlfs.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


def test_a_run_saves_to_and_restores_from_blobs(url, monkeypatch):
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
                run.commit()
    with train.start(CheckpointPolicy(path=url)) as run:
        model = nn.Linear(3, 2)
        run.track(model=model, optimizer=torch.optim.Adam(model.parameters()))
        assert run.steps == 10
        assert model.weight.unique().tolist() == [10.0]
    storage = open_storage(url)
    assert isinstance(storage, RemoteStorage)
    assert [name[:17] for name in storage.folders()] == ["step-000000000008", "step-000000000010"]
