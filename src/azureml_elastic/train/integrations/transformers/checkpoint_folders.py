"""The checkpoint folders that ``Trainer`` writes for people: complete, or not taken for a checkpoint.

A folder holds a marker while it is written. The marker has the name that transformers gives it for checkpoints on
SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from azureml_elastic.train.integrations.durable_files import all_arrive, flush

__all__ = ["INCOMPLETE", "newest", "save"]

INCOMPLETE = "checkpoint-is-incomplete.txt"

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
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / INCOMPLETE
        marker.write_text("This checkpoint is being written, or its writer has ended meanwhile.\n")
        flush(marker)
        flush(folder)
    all_arrive()
    result = write()
    all_arrive()
    if trainer.args.should_save:
        with contextlib.suppress(OSError):  # save_total_limit may have removed the folder
            for path in folder.rglob("*"):
                flush(path)
            (folder / INCOMPLETE).unlink()
            flush(folder)
    all_arrive()  # were the others to go on and rank 0 lost before this, nobody would write the folder again
    return result
