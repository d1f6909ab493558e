"""Loggers of Lightning, and callbacks that write to their folders, go on where the former process has ended."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["continue_file", "continue_from", "set_versions", "versions_of"]

_VERSIONS = {"TensorBoardLogger": "_version", "CSVLogger": "_version", "MLFlowLogger": "_run_id"}
"""Attribute with the version or the run, by class; other loggers take theirs from the script."""

_EMPTY_CHECK = "_ModelCheckpoint__warn_if_dir_not_empty"

_continued: dict[str, int] = {}
"""Number of steps that are logged in a folder."""


def versions_of(trainer: Any) -> list[Any]:
    """Return class and version of each logger; on rank 0, which makes its folder or run if there is none."""
    return [[type(logger).__name__, logger.version if _attribute(logger) else None] for logger in trainer.loggers]


def set_versions(trainer: Any, versions: list[Any]) -> list[Any]:
    """Set the versions of loggers that have not begun to write, and return those loggers."""
    found = []
    for logger, (kind, version) in zip(trainer.loggers, versions, strict=False):
        name = _attribute(logger)
        begun = name == "_version" and getattr(logger, "_experiment", None) is not None
        if name and kind == type(logger).__name__ and version is not None and not begun:
            setattr(logger, name, version)
            found.append(logger)
    return found


def continue_from(trainer: Any, state: Mapping[str, Any]) -> None:
    """Have the loggers of a new trainer continue those of the former process, and callbacks accept its files.

    Args:
        trainer: trainer whose loggers have not begun to write
        state: ``versions`` of the loggers, and the number of steps that they have logged as ``lines``
    """
    for logger in set_versions(trainer, state["versions"]):
        if getattr(logger, "log_dir", None) is not None:
            _continued[str(logger.log_dir)] = state["lines"]
    for callback in trainer.callbacks:
        if any(kind.__name__ == "SaveConfigCallback" for kind in type(callback).__mro__):
            callback.overwrite = True  # LightningCLI would refuse to write the same file again
        if hasattr(callback, _EMPTY_CHECK):
            setattr(callback, _EMPTY_CHECK, lambda _: None)


def continue_file(writer: Any) -> bool:
    """Have a writer of a CSV file append to it after the lines of the steps that are logged; return whether it will.

    Args:
        writer: writer of a folder, about to remove the file that is there
    """
    path, lines = Path(writer.metrics_file_path), _continued.get(str(writer.log_dir))
    if lines is None:
        return False
    if path.is_file():
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            names, found = list(reader.fieldnames or ()), list(reader)
        # Later steps are trained again, or their lines have not all been written.
        kept = [line for line in found if not (line.get("step") or "").isdigit() or int(line["step"]) < lines]
        if len(kept) < len(found):
            with path.open("w", newline="") as file:
                rest = csv.DictWriter(file, fieldnames=names)
                rest.writeheader()
                rest.writerows(kept)
        writer.metrics_keys = names
    return True


def _attribute(logger: Any) -> str | None:
    return next((_VERSIONS[each.__name__] for each in type(logger).__mro__ if each.__name__ in _VERSIONS), None)
