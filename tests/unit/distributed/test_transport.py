"""A transport of gloo that torch was built without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from azureml_elastic.distributed.process import open_group
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity


def test_tls_is_refused_clearly_where_torch_was_built_without_it(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "a transport of another release")
    with pytest.raises(UsageError, match="GLOO_DEVICE_TRANSPORT=a transport of another release is not supported"):
        open_group(WorkerIdentity(0, 0, 1, 0), torch.device("cpu"))
    assert not dist.is_initialized()
