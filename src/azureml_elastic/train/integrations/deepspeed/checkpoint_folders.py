"""The folders that ``engine.save_checkpoint`` writes for any number of ranks.

``<save_dir>/<tag>`` holds the state in this library's format, the script's ``client_state``, and the position in the
data; ``<save_dir>/latest`` names the last complete one, as DeepSpeed has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from azureml_elastic.train.integrations.durable_files import flush

__all__ = ["find", "read_client_state", "set_latest", "state_of", "write_client_state"]

_CLIENT_STATE = "client_state.pt"
_LATEST = "latest"
_STATE = "elastic_state"


def state_of(folder: Path) -> Path:
    """Return the folder of the state within a checkpoint folder."""
    return folder / _STATE


def find(load_dir: Any, tag: Any) -> Path | None:
    """Return the folder of a tag, or of the last complete checkpoint without one; ``None`` where there is none."""
    parent = Path(load_dir).expanduser()
    if tag is None:
        try:
            tag = (parent / _LATEST).read_text(encoding="utf-8").strip()
        except OSError:
            return None
    return parent / str(tag)


def set_latest(folder: Path) -> None:
    """Name a folder as the last complete checkpoint beside it."""
    temporary = folder.parent / f".{_LATEST}"
    temporary.write_text(folder.name, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, folder.parent / _LATEST)  # noqa: PTH105
    flush(folder.parent)


def write_client_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what the script keeps in a checkpoint."""
    torch.save(dict(state), folder / _CLIENT_STATE)


def read_client_state(folder: Path) -> dict[str, Any]:
    """Return what the script keeps in a checkpoint, as DeepSpeed loads it: any object."""
    found: dict[str, Any] = torch.load(folder / _CLIENT_STATE, map_location="cpu", weights_only=False)
    return found
