"""What a script with DeepSpeed keeps in its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from azureml_elastic.errors import UsageError
from azureml_elastic.train.integrations.deepspeed.training_loop import CheckpointFolders, client_state_bytes


def test_plain_values_and_tensors_are_kept(tmp_path):
    state = {"steps": 3, "name": "a", "losses": [0.5, 0.25], "mean": torch.ones(2)}
    (tmp_path / "client_state.pt").write_bytes(client_state_bytes(state))
    found = CheckpointFolders.client_state(tmp_path)
    assert found.pop("mean").tolist() == [1.0, 1.0]
    assert found == {"steps": 3, "name": "a", "losses": [0.5, 0.25]}


@pytest.mark.parametrize("value", [Path("/data"), lambda: None], ids=["object", "function"])
def test_other_objects_are_refused_before_anything_is_written(value):
    with pytest.raises(UsageError, match=r"client_state=\['what'\] .* without executing code"):
        client_state_bytes({"what": value})
