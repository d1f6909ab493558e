"""Wraps the functions of DeepSpeed on which the integration depends, when the script imports them."""

from __future__ import annotations

import base64
import copy
import inspect
import json
import logging
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch.utils.data
from torch.utils.data import DataLoader, DistributedSampler
from wrapt import wrap_function_wrapper

from azureml_elastic.errors import UsageError
from azureml_elastic.train.deepspeed_batches import (
    GLOBAL_BATCH,
    batch_sizes,
    for_engine,
    show,
)
from azureml_elastic.train.integrations.deepspeed.training_loop import CheckpointFolders, TrainingLoop
from azureml_elastic.train.integrations.script_loop.own_schedulers import note_schedulers
from azureml_elastic.train.integrations.wrapping import Wrapped, Wrappers, attaching, first_of, in_loop, in_session
from azureml_elastic.train.session.stack_session import StackSession, stack_session

_LOG = logging.getLogger(__name__)

_LOOP = "_azureml_elastic_loop"
"""Attribute of an engine with its :class:`TrainingLoop`."""

_FOLDERS = "_azureml_elastic_folders"
"""Attribute of an engine with its :class:`CheckpointFolders`, also where another stack drives it."""

another_stack_prepares: ContextVar[bool] = ContextVar("another_stack_prepares", default=False)
"""Whether accelerate makes the engine, for its own loops or those of ``transformers.Trainer``. Then that stack drives
it, and the stack's integration divides the data."""

_loops: list[TrainingLoop] = []

_own_calls: list[bool] = []
"""Not empty once the script has called DeepSpeed by itself: a script of another stack keeps its loaders' lengths."""


def _wrap_loaders(_: Any) -> None:
    note_schedulers()
    # Scripts divide their data by a DistributedSampler of the present ranks, and count its batches before they make an
    # engine: no function of DeepSpeed sees such a loader.
    wrap_function_wrapper(torch.utils.data, "DataLoader.__iter__", _iterate)
    wrap_function_wrapper(torch.utils.data, "DataLoader.__len__", _length)


def _in(attribute: str, *methods: str) -> dict[str, Wrapped]:
    return {
        f"DeepSpeedEngine.{name}": in_loop(name, lambda engine: getattr(engine, attribute, None)) for name in methods
    }


@in_session
def _init_distributed(session: StackSession, wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    _own_calls.append(True)
    session.wait_at_most(kwargs.get("timeout"))
    return wrapped(*args, **kwargs)


@in_session
def _initialize(session: StackSession, wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    if another_stack_prepares.get():
        config, ranks = _take_config(given), session.reference_world_size
        # The stack has computed the global batch of the present number of ranks.
        sizes = batch_sizes({name: value for name, value in config.items() if name != GLOBAL_BATCH}, ranks)
        assert sizes is not None
        given["config"] = for_engine(config, sizes, ranks)
        made = wrapped(*call.args, **call.kwargs)
        show(made[0], sizes)
        setattr(made[0], _FOLDERS, CheckpointFolders(session, made[0]))
        return made
    _own_calls.append(True)
    reason = _obstacle(given)
    if reason is not None:
        if session.is_main:
            _LOG.warning("deepspeed.initialize() does not use the elastic session: %s.", reason)
        return wrapped(*args, **kwargs)
    if session.trains or _loops:
        raise UsageError(
            "deepspeed.initialize() was called a second time in this process: the run saves the state of one engine. "
            "Set AZUREML_ELASTIC_INTEGRATIONS=off to train without the elastic session."
        )
    config = _take_config(given)
    known = batch_sizes(config, session.reference_world_size)
    if known is not None:
        given["config"] = for_engine(config, known, session.reference_world_size)
    # DeepSpeed makes a loader of the data within this call, before the engine has a loop that would replace it.
    dataset, given["training_data"] = given["training_data"], None
    engine, optimizer, loader, scheduler = wrapped(*call.args, **call.kwargs)
    if known is not None:
        loop = TrainingLoop(session, engine, known)
        setattr(engine, _LOOP, loop)
        setattr(engine, _FOLDERS, loop.folders)
        _loops.append(loop)
        if dataset is not None:
            loader = engine.training_dataloader = engine.deepspeed_io(dataset)
    return engine, optimizer, loader, scheduler


def _obstacle(given: dict[str, Any]) -> str | None:
    reasons: dict[str | None, bool] = {
        "the model is a pipeline": any(kind.__name__ == "PipelineModule" for kind in type(given["model"]).__mro__),
        "the ranks are divided among several kinds of parallelism": any(
            given.get(name) is not None for name in ("mpu", "mesh_param")
        ),
    }
    return first_of(reasons)


def _take_config(given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that a call of ``deepspeed.initialize`` gives in one of four places, and remove it."""
    config = given["config"] if given["config"] is not None else given.get("config_params")
    given["config_params"] = None
    arguments = given["args"]
    for name in ("deepspeed_config", "deepscale_config"):
        found = getattr(arguments, name, None)
        if found is not None and config is None:
            config = found
            arguments = given["args"] = copy.copy(arguments)  # DeepSpeed refuses a second configuration beside config=
            setattr(arguments, name, None)
    if config is None:
        raise UsageError("deepspeed.initialize() has no configuration. Give config=, or the option --deepspeed_config.")
    return config if isinstance(config, dict) else _read_config(str(config))


def _read_config(config: str) -> dict[str, Any]:
    """Return the configuration in a file, or in a string that Hugging Face's command-line options encode."""
    text = Path(config).read_text(encoding="utf-8") if Path(config).is_file() else base64.urlsafe_b64decode(config)
    found: dict[str, Any] = json.loads(text)
    return found


def _iterate(wrapped: Wrapped, loader: Any, args: Any, kwargs: Any) -> Any:
    if _loops and _is_training_data(loader):
        replaced = _loops[0].replaced(loader)
        if replaced is not None:
            return iter(replaced)
    return wrapped(*args, **kwargs)


def _length(wrapped: Wrapped, loader: Any, args: Any, kwargs: Any) -> Any:
    """Return a length that does not depend on the world size, also before there is an engine."""
    if _own_calls and _is_training_data(loader):
        if _loops:
            replaced = _loops[0].replaced(loader)
            return wrapped(*args, **kwargs) if replaced is None else len(replaced)
        session = stack_session()
        if session is not None:
            samples, size = len(loader.dataset), loader.batch_size * session.reference_world_size
            return samples // size if loader.drop_last else -(-samples // size)
    return wrapped(*args, **kwargs)


def _is_training_data(loader: DataLoader[Any]) -> bool:
    """Return whether a loader of the script divides samples among the ranks in random order."""
    sampler = getattr(loader, "sampler", None)
    return type(sampler) is DistributedSampler and sampler.shuffle and loader.batch_size is not None


WRAPPERS: Wrappers = {
    "deepspeed": {"init_distributed": _init_distributed, "initialize": _initialize},
    "deepspeed.runtime.engine": {
        **_in(_LOOP, "backward", "step", "deepspeed_io"),
        **_in(_FOLDERS, "save_checkpoint", "load_checkpoint"),
    },
}

attach = attaching(WRAPPERS, {"deepspeed": _wrap_loaders})
