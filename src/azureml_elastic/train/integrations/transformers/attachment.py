"""Wraps the functions of transformers on which the integration depends, when the script imports them.

The checkpoint folders that ``Trainer`` writes for people are complete, or not taken for a checkpoint: a folder holds a
marker while it is written, which has the name that transformers gives it for checkpoints on
SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from azureml_elastic.distributed.device import device_of
from azureml_elastic.train.integrations.accelerate.attachment import another_stack_trains
from azureml_elastic.train.integrations.script_loop.state_folders import flush, write_together
from azureml_elastic.train.integrations.transformers.evaluation import evaluating
from azureml_elastic.train.integrations.transformers.training_data import DATA_METHODS
from azureml_elastic.train.integrations.transformers.training_loop import METHODS, TrainingLoop, obstacle
from azureml_elastic.train.integrations.wrapping import Wrapped, Wrappers, attaching, holds, in_session, replaced
from azureml_elastic.train.session.stack_session import StackSession, stack_session

INCOMPLETE = "checkpoint-is-incomplete.txt"

_ARGUMENTS = "transformers.training_args"

_NAME = re.compile(r"checkpoint-(\d+)")


def newest(folder: str) -> str | None:
    """Return the complete checkpoint folder of the highest step; see ``transformers.trainer_utils``.

    Raises:
        OSError: the folder cannot be listed.
    """
    found: list[tuple[int, str]] = []
    for name in os.listdir(folder):  # noqa: PTH208 - as the stack's function: a relative path stays one
        matched, path = _NAME.fullmatch(name), os.path.join(folder, name)  # noqa: PTH118
        if matched and Path(path).is_dir() and not Path(path, INCOMPLETE).exists():
            found.append((int(matched[1]), path))
    return max(found)[1] if found else None


def save(trainer: Any, write: Callable[[], Any]) -> Any:
    """Have a checkpoint folder of the current step written, marked as incomplete meanwhile. A collective."""
    folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}"  # noqa: SLF001
    marker = folder / INCOMPLETE

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text("This checkpoint is being written, or its writer has ended meanwhile.\n")
        # Before the first file is written: a crash must not keep that and lose the mark.
        flush(marker)
        flush(folder)

    def complete() -> None:
        with contextlib.suppress(FileNotFoundError):  # save_total_limit may have removed the folder
            marker.unlink()
            flush(folder)

    return write_together(folder, write, begin, complete, is_main=trainer.args.should_save)


def _require_methods(module: Any) -> None:
    for name in (*METHODS, *DATA_METHODS):
        getattr(module.Trainer, name)  # as for the functions that are wrapped, see wrapping.py


def _replace_number_of_ranks(module: Any) -> None:
    ranks = module.TrainingArguments.world_size.fget
    module.TrainingArguments.world_size = property(partial(_world_size, ranks))


@in_session
def _begin(session: StackSession, wrapped: Wrapped, arguments: Any, args: Any, kwargs: Any) -> Any:
    """Have the session open the process group before the stack would."""
    session.wait_at_most(arguments.ddp_timeout_delta)
    if not device_of(session.device).separate and not arguments.deepspeed:
        arguments.use_cpu = True  # without it the ranks of a machine without a GPU train apart
    return wrapped(*args, **kwargs)


def _world_size(wrapped: Callable[[Any], int], arguments: Any) -> int:
    """Return the number of ranks of a run with all nodes to the constructor of a subclass of ``TrainingArguments``.

    Sizes that it computes, as of what trl generates for a step, must not depend on the present number.
    """
    caller = sys._getframe(1)  # noqa: SLF001
    constructs = caller.f_code.co_name == "__post_init__" and caller.f_globals.get("__name__") != _ARGUMENTS
    session = stack_session() if constructs else None
    return wrapped(arguments) if session is None else session.reference_world_size


@in_session
def _train(session: StackSession, wrapped: Wrapped, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def save_marked(wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        return save(trainer, partial(wrapped, *args, **kwargs))

    with holds(another_stack_trains), replaced(trainer, {"_save_checkpoint": save_marked}):
        if obstacle(session, trainer, args, kwargs) is not None:
            return wrapped(*args, **kwargs)
        return TrainingLoop(session, trainer).train(wrapped, *args, **kwargs)


@in_session
def _evaluation_loop(session: StackSession, wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    prepared = args[0] if args else kwargs.pop("dataloader")
    # Of the loader that the trainer has prepared, in place of get_eval_dataloader, which subclasses override.
    with evaluating(trainer, prepared, session.from_main) as loader:
        return wrapped(loader, *args[1:], **kwargs)


def _create_accelerator(wrapped: Wrapped, trainer: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    trainer.accelerator._azureml_elastic_apart = True  # the integration of accelerate leaves it alone  # noqa: SLF001
    return result


def _load_engine(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    # A function of the module, without the trainer: the folder's name shows what it stands for.
    if TrainingLoop.restores(args[1] if len(args) > 1 else kwargs.get("checkpoint_path")):
        return None
    return wrapped(*args, **kwargs)


WRAPPERS: Wrappers = {
    # It makes the arguments' device, and with it the process group.
    _ARGUMENTS: {"TrainingArguments.__post_init__": _begin},
    "transformers.trainer_utils": {
        "get_last_checkpoint": lambda wrapped, instance, args, kwargs: newest(*args, **kwargs)
    },
    "transformers.trainer": {
        "Trainer.train": _train,
        "Trainer.evaluation_loop": _evaluation_loop,
        "Trainer.create_accelerator_and_postprocess": _create_accelerator,
        "deepspeed_load_checkpoint": _load_engine,
    },
}

attach = attaching(WRAPPERS, {_ARGUMENTS: _replace_number_of_ranks, "transformers.trainer": _require_methods})
