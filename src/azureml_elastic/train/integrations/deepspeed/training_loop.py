"""The loop of a script with a DeepSpeed engine within a run.

The engine's state is tracked whole; see :mod:`..script_loop.loop` for what a restarted script does.

``engine.save_checkpoint`` writes folders for any number of ranks: ``<save_dir>/<tag>`` holds the engine's state in this
library's format, and the script's ``client_state``; ``<save_dir>/latest`` names the last complete one, as DeepSpeed has
it.
"""

from __future__ import annotations

import io
import logging
import os
import pickle  # its errors alone
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.map_loader import loader_options
from azureml_elastic.train.deepspeed_batches import BatchSizes, show
from azureml_elastic.train.integrations.script_loop import state_folders
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader
from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop, Stack
from azureml_elastic.train.integrations.script_loop.own_schedulers import schedulers_of
from azureml_elastic.train.integrations.script_loop.state_folders import Place, flush
from azureml_elastic.train.integrations.wrapping import Wrapped
from azureml_elastic.train.session.stack_session import StackSession

_CLIENT_STATE = "client_state.pt"
_LATEST = "latest"
_STATE = "elastic_state"

_LOG = logging.getLogger(__name__)


class CheckpointFolders:
    """The checkpoint folders of an engine. The methods that take ``wrapped`` are called in place of the engine's.

    Args:
        loop: loop of the script's own; ``None`` where another stack drives the engine, which marks folders by itself
    """

    def __init__(self, session: StackSession, engine: Any, loop: ScriptLoop | None = None) -> None:
        self._session = session
        self._engine = engine
        self._loop = loop

    @cached_property
    def _objects(self) -> TrackedState:
        return TrackedState({"engine": self._engine})

    def save_checkpoint(
        self,
        wrapped: Wrapped,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Save a checkpoint for any number of ranks. A collective.

        Raises:
            CheckpointError: a rank cannot write it.
            UsageError: the script keeps objects that cannot be read without executing code.
        """
        del wrapped, args, kwargs
        name = str(tag if tag is not None else f"global_step{self._engine.global_steps}")
        folder, content, loop, complete = Path(save_dir).expanduser() / name, client_state or {}, self._loop, True
        if loop is None:
            if self._session.is_main:
                folder.mkdir(parents=True, exist_ok=True)
            self._write(folder, content)
        else:
            loop.folders.save(folder, _place_for(loop, content), lambda: self._write(folder, content), make=True)
            place = state_folders.read(folder)
            complete = place is not None and place.complete
        if save_latest and complete and self._session.is_main:
            self._set_latest(folder)
        return True

    def _write(self, folder: Path, content: Mapping[str, Any]) -> None:
        kept = client_state_bytes(content)
        self._session.write_checkpoint(folder / _STATE, self._objects)
        if self._session.is_main:
            (folder / _CLIENT_STATE).write_bytes(kept)

    def _set_latest(self, folder: Path) -> None:
        """Name a folder as the last complete checkpoint beside it."""
        temporary = folder.parent / f".{_LATEST}"
        temporary.write_text(folder.name, encoding="utf-8")
        flush(temporary)  # first: who reads it finds the former name or this one, whole, also after a crash
        os.replace(temporary, folder.parent / _LATEST)  # noqa: PTH105
        flush(folder.parent)

    def load_checkpoint(self, wrapped: Wrapped, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, in a loop of the script's own where it is further than the state of the run.

        Returns:
            The path of the folder, and what the script keeps in it.

        Raises:
            CheckpointDamaged: the checkpoint is not complete.
            UsageError: it does not fit the engine, or a part is wanted of a checkpoint that has no parts.
            ValueError: the folder is not complete, and further than the state of the run.
        """
        folder = self.find(load_dir, tag, **kwargs)
        if folder is None:
            return wrapped(load_dir, tag, *args, **kwargs)

        def read() -> None:
            self._session.read_checkpoint(folder / _STATE, self._objects)

        if self._loop is None:
            read()
        else:
            self._loop.folders.load(folder, read)
        return str(folder), self.client_state(folder)

    def find(
        self, load_dir: Any, tag: Any, *, load_module_only: bool = False, load_optimizer_states: bool = True, **_: Any
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

    @staticmethod
    def client_state(folder: Path) -> dict[str, Any]:
        """Return what the script keeps in a checkpoint."""
        found: dict[str, Any] = torch.load(folder / _CLIENT_STATE, map_location="cpu", weights_only=True)
        return found


def _place_for(loop: ScriptLoop, client_state: Mapping[str, Any]) -> Place:
    """Return the position, after an epoch's last step in the epoch for which the script takes it.

    A script that saves at the end of epoch 3 with ``{"epoch": 3}`` goes on with epoch 4 by itself.
    """
    place = loop.folders.here
    if loop.training is not None and not place.windows and client_state.get("epoch") == place.epoch - 1:
        return replace(place, epoch=place.epoch - 1, windows=loop.windows.steps_per_epoch)
    return place


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


class TrainingLoop(Stack):
    """The engine's part in a loop. The methods that take ``wrapped`` are called in place of its own."""

    unstepped = "engine.step() was not called after the last batch of an optimizer step: call it after each batch."

    def __init__(self, session: StackSession, engine: Any, sizes: BatchSizes) -> None:
        self._loop = ScriptLoop(session, self, accumulation=sizes.accumulation, batch_size=sizes.micro_batch)
        self._session = session
        self._engine = engine
        self._sizes = sizes
        self.folders = CheckpointFolders(session, engine, self._loop)
        self._source: Any = None
        self._loader: EpochLoader | None = None
        self._plain = False  # whether the source is about to be iterated over by itself
        show(engine, sizes)

    @override
    def objects(self) -> Mapping[str, Any]:
        return {"engine": self._engine}

    @override
    def models(self) -> list[nn.Module]:
        return [self._engine]

    @override
    def own_schedulers(self) -> list[Any]:
        engine = self._engine
        found = (getattr(engine, name, None) for name in ("optimizer", "basic_optimizer", "client_optimizer"))
        optimizers = [each for each in found if each is not None]
        inner = [each.optimizer for each in optimizers if hasattr(each, "optimizer")]
        return schedulers_of([*optimizers, *inner], [engine.lr_scheduler])

    @override
    def mark(self, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)  # from the first call on, the engine counts no batches

    @override
    def plain_batches(self) -> Iterator[Any]:
        self._plain = True
        try:
            batches = iter(self._source)
        finally:
            self._plain = False
        yield from batches

    def deepspeed_io(self, wrapped: Wrapped, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a loader of windows over the data in place of the engine's, where those are the training's."""
        loader, engine = wrapped(dataset, *args, **kwargs), self._engine
        others = any(kwargs.get(name) for name in ("route", "data_sampler", "batch_size"))
        if args or others or self._loader is not None:
            return loader
        if isinstance(dataset, IterableDataset) or loader.curriculum_learning_enabled:
            reason = "the engine has curriculum learning" if loader.curriculum_learning_enabled else "it has no index"
            self._loop.warn(f"DeepSpeed divides the samples of {type(dataset).__name__} among the ranks: {reason}. "
                            "Samples may repeat or be left out after a change of the world size.")  # fmt: skip
            return loader
        workers = loader.num_local_io_workers or 0
        separate = device_of(self._session.device).separate
        return self._replace(
            loader,
            dataset,
            seed=0,
            drop_last=engine.dataloader_drop_last(),
            collate_fn=loader.collate_fn,
            num_workers=workers if separate else 0,
            pin_memory=loader.pin_memory and separate,
        )

    def replaced(self, loader: DataLoader[Any]) -> EpochLoader | None:
        """Return the loader in place of one of the script's that divides its data among the ranks, if there is one."""
        if self._source is loader or self._plain:
            return None if self._plain else self._loader
        if self._loader is not None or loader.batch_size != self._sizes.micro_batch:
            known = "another loader is the one of the training" if self._loader is not None else (
                f"its batch size is {loader.batch_size}, and that of the engine {self._sizes.micro_batch}"
            )  # fmt: skip
            self._loop.warn(f"The script divides the samples of {type(loader.dataset).__name__} among the ranks by "
                            f"itself: {known}. Samples may repeat or be left out after a change of the world "
                            "size.")  # fmt: skip
            return None
        sampler: Any = loader.sampler
        options = {"seed": sampler.seed, "drop_last": loader.drop_last, **loader_options(loader)}
        return self._replace(loader, loader.dataset, **options)

    def _replace(self, source: Any, dataset: Any, **options: Any) -> EpochLoader:
        sizes = self._sizes
        windows = self._session.windows(
            dataset,
            batch_size=sizes.micro_batch,
            batches=sizes.accumulation,
            global_batch_size=sizes.global_batch,
            **options,
        )
        self._source, self._loader = source, self._loop.loader_of(lambda: source, windows)
        return self._loader

    def backward(self, wrapped: Wrapped, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weigh a micro-batch's loss of shape () so that the mean over the ranks is the mean over the samples."""
        batch = self._loop.steps.train_batch(loss)
        if self._loop.repeating:
            return loss
        if batch is None:
            self._loop.warn("The script trains a batch that the session does not divide among the ranks, as of a "
                            "loader with a sampler of its own: its samples may repeat or be left out after a change of "
                            "the nodes"
                            + (". " if self._loop.begun else ", and the run neither saves nor restores this training. ")
                            + "Divide it by a DistributedSampler with shuffle=True, or by deepspeed_io().")  # fmt: skip
            return wrapped(loss, *args, **kwargs)
        # The weight stands for DeepSpeed's division by its number of batches, which scripts expect of what is returned.
        wrapped(loss * batch.micro.weight, *args, **{**kwargs, "scale_wrt_gas": False})
        return loss / self._loop.accumulation if kwargs.get("scale_wrt_gas", True) else loss

    def step(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Step, and complete the step after the last micro-batch: what follows may fail because a peer is lost."""
        if self._loop.steps.repeat_update(self._engine):
            return None
        result = wrapped(*args, **kwargs)
        self._loop.steps.note_update(self._engine)
        self._loop.steps.complete_step()
        return result
