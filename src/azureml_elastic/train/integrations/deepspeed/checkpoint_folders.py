"""The folders that ``engine.save_checkpoint`` writes for any number of ranks.

``<save_dir>/<tag>`` holds the engine's state in this library's format, and the script's ``client_state``;
``<save_dir>/latest`` names the last complete one, as DeepSpeed has it.
"""

from __future__ import annotations

import io
import os
import pickle  # its errors alone
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.errors import UsageError
from azureml_elastic.train.integrations.durable_files import flush
from azureml_elastic.train.session.stack_session import StackSession

__all__ = ["CheckpointFolders", "client_state_bytes"]

_CLIENT_STATE = "client_state.pt"
_LATEST = "latest"
_STATE = "elastic_state"


class CheckpointFolders:
    """The checkpoint folders of an engine. The methods that take ``wrapped`` are called in place of the engine's.

    Args:
        session: session
        engine: engine
    """

    def __init__(self, session: StackSession, engine: Any) -> None:
        self._session = session
        self._engine = engine
        self._tracked: TrackedState | None = None

    @property
    def _objects(self) -> TrackedState:
        if self._tracked is None:
            self._tracked = TrackedState({"engine": self._engine}, lambda: None, ())
        return self._tracked

    # --- writing -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        wrapped: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Save a checkpoint of an engine that another stack drives, which marks its folders by itself."""
        del wrapped, args, kwargs
        folder = self.folder(save_dir, tag)
        if self._session.is_main:
            folder.mkdir(parents=True, exist_ok=True)
        self.write(folder, client_state or {})
        if save_latest:
            self.set_latest(folder)
        return True

    def folder(self, save_dir: Any, tag: Any) -> Path:
        """Return the folder of a tag, by default of the number of steps."""
        return Path(save_dir).expanduser() / str(tag if tag is not None else f"global_step{self._engine.global_steps}")

    def write(self, folder: Path, client_state: Mapping[str, Any]) -> None:
        """Write the engine's state and what the script keeps with it. A collective.

        Raises:
            CheckpointError: a rank cannot write it.
            UsageError: the script keeps objects that cannot be read without executing code.
        """
        content = client_state_bytes(client_state)
        self._session.write_checkpoint(folder / _STATE, self._objects)
        if self._session.is_main:
            (folder / _CLIENT_STATE).write_bytes(content)

    def set_latest(self, folder: Path) -> None:
        """Name a folder as the last complete checkpoint beside it."""
        if not self._session.is_main:
            return
        temporary = folder.parent / f".{_LATEST}"
        temporary.write_text(folder.name, encoding="utf-8")
        flush(temporary)
        os.replace(temporary, folder.parent / _LATEST)  # noqa: PTH105
        flush(folder.parent)

    # --- reading -----------------------------------------------------------------------------------------------------

    def load_checkpoint(self, wrapped: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of an engine that another stack drives.

        Raises:
            CheckpointDamaged: the checkpoint is not complete.
            UsageError: it does not fit the engine.
        """
        folder = self.find(load_dir, tag, **kwargs)
        if folder is None:
            return wrapped(load_dir, tag, *args, **kwargs)
        self.read(folder)
        return str(folder), self.client_state(folder)

    def find(
        self,
        load_dir: Any,
        tag: Any,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        **_: Any,
    ) -> Path | None:
        """Return the folder of a tag, by default the last one; ``None`` where there is none of this library's format.

        Raises:
            UsageError: a part of the state is wanted, which cannot be read alone.
        """
        parent = Path(load_dir).expanduser()
        if tag is None:
            try:
                tag = (parent / _LATEST).read_text(encoding="utf-8").strip()
            except OSError:
                return None
        folder = parent / str(tag)
        if not (folder / _STATE).is_dir():
            return None
        if load_module_only or not load_optimizer_states:
            raise UsageError(
                f"{folder} holds the state of the engine as a whole, so that engine.load_checkpoint() cannot load the "
                f"weights alone. Export them: azureml-elastic checkpoints export {folder / _STATE} model.safetensors "
                "--object engine/parameters."
            )
        return folder

    def read(self, folder: Path) -> None:
        """Restore the engine. A collective.

        Raises:
            CheckpointDamaged: the checkpoint is not complete.
            UsageError: it does not fit the engine.
        """
        self._session.read_checkpoint(folder / _STATE, self._objects)

    @staticmethod
    def client_state(folder: Path) -> dict[str, Any]:
        """Return what the script keeps in a checkpoint."""
        found: dict[str, Any] = torch.load(folder / _CLIENT_STATE, map_location="cpu", weights_only=True)
        return found


def client_state_bytes(state: Mapping[str, Any]) -> bytes:
    """Return what a script keeps in a checkpoint as a file, which is read without executing code.

    Raises:
        UsageError: it holds other objects than numbers, texts, tensors, and lists and dictionaries of those.
    """
    content = io.BytesIO()
    try:
        torch.save(dict(state), content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"client_state={sorted(map(str, state))} of engine.save_checkpoint() holds objects that cannot be read "
            "without executing code. Keep numbers, texts, tensors, and lists and dictionaries of those."
        ) from error
    return content.getvalue()
